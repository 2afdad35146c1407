"""Microbenchmarks that fill a machine file from the GPU at hand (``tilecast calibrate``).

    cases.py      a benchmark is a frozen `Case`: CUDA file, generated prelude, launch, how to read its records
    groups/       the cases of every group (tensor, arithmetic, corun, ...), as functions of the architecture
    cu/           one CUDA file a question
    nvrtc.py      source -> machine code, no GPU needed     gpu.py      launching and telemetry, GPU needed
    store.py      one tidy CSV row a result                 run.py      cases -> rows, resumable
    facts*.py     rows -> facts of the machine file         report.py   machine file, table and holes

No attention kernel takes part: the numbers may be used to forecast attention kernels.
"""
