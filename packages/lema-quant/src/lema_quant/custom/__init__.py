"""The backend ``custom``: every wire format without another library, in plain torch and by native kernels.

Each formula is made of correctly rounded operations in a fixed order, so that both give the same bytes.
"""
