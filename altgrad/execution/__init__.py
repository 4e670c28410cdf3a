"""The cells of a grid, several at once, ahead of `dvc repro`: ``make repro``.

    __main__ -> cells -> handover -> plan -> dvc_api
                cells -> progress   -> executor
                cells -> draft
    __main__ -> local -> worker
                local               -> executor

Only the command, ``python -m altgrad.execution``, imports this room. README.md says how to add an executor.
"""
