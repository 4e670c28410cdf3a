"""Train and diagnose several cells of a grid at a time, before `dvc repro` would: ``make repro``.

    __main__ -> cells -> pending  -> dvc_api -> dvc_files
                cells -> progress -> executor
    __main__ -> local, on_ray     -> executor

Three programs use this package: the command ``python -m altgrad.execution``, `altgrad.stability`, which runs cells, and
`altgrad.watch`, which shows them. README.md says how to add an executor.
"""
