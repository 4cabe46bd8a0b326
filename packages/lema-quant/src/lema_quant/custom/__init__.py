"""The backend ``custom``: every wire format in plain torch, without another library.

Each formula is made of correctly rounded operations in a fixed order, so that other implementations can give the same
bytes.
"""
