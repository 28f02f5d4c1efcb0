"""The laboratory: everything that trains, measures, compares and draws what the core defines.

The core never imports it. `residua.cli` is its door on the command line.
"""
