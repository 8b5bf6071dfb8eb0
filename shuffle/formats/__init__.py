"""Formats of messages: the values of a batch into columns, and columns into values. Inputs and outputs share them."""
