"""The only place with autograd: one op forward, one op backward, one Function."""
