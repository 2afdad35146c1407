"""Forecasts from machine code: what the compiler really wrote, run instruction by instruction through one SM.

The analytical pipeline (`model/pipelines`, `model/simulate`) forecasts a variant before it exists.  This layer forecasts
a kernel that has been compiled: `codegen/compiler/machine_code.py` reads its instructions once, everything here needs neither a
compiler nor a GPU.
"""
