"""`terrazzo bench gpu --suite operators`: single operators at large shapes, beside eager."""
