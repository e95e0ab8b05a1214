"""Code that the tests compile."""

GELU = "x=torch.randn(32,18944);0.5*x*(1+torch.tanh(0.797*(x+0.044*x*x*x)))"
RMS_NORM = "torch.nn.RMSNorm(2048)(torch.randn(1,32,2048))"
SOFTMAX = "torch.softmax(torch.randn(8, 128), -1)"
