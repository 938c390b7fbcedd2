"""Every check of an argument, once, and the error that it raises; no other folder checks one.

By subject: names.py (arguments that there are not), values.py (numbers, switches, names), tensors.py (one tensor),
call.py (the tensors of a call against one another), decode.py (those of a decoding call), functions.py (the parts of
a user's function), mask_functions.py (what trees and their like are made of). The constructors of masks, functions and
problems call these, which is why they stand below them and know masks and functions by what they have. What lies in a
tensor is looked at in problem/length_checks.py.
"""
