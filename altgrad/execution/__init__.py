"""The cells of a grid, several at once, ahead of `dvc repro`: ``make repro``.

    __main__ -> cells -> plan -> dvc_api
                cells -> progress   -> executor
    __main__ -> local -> worker
                local               -> executor

The command, ``python -m altgrad.execution``, imports this package. So do the two around a run: `altgrad.stability`,
which has cells run, and `altgrad.watch`, which looks at them. README.md says how to add an executor.
"""
