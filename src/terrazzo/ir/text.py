def show(x): return object.__repr__(x)
