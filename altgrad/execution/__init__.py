"""The cells of a grid, several at once, ahead of `dvc repro`: ``make repro``.

    __main__ -> cells -> pending  -> dvc_api -> dvc_files
                cells -> progress -> executor
    __main__ -> local, on_ray     -> executor

The command, ``python -m altgrad.execution``, imports this package, and so do `altgrad.stability`, which has cells run,
and `altgrad.watch`, which looks at them. README.md says how to add an executor.
"""
