"""No stage: `make repro` runs this while it tokenizes, to build the C++ loops that training would build first.

Compiling the loops takes one core most of a minute. Nothing waits for this process, and it may fail: training builds
missing loops itself and reports what prevents it.
"""

from altgrad.common.fingerprint import project_root


def main() -> None:
    """Build the loops of all packages in the cache that training uses, in the order in which a step needs them."""
    from altgrad.numerics import loops
    from altgrad.optim import update_cpu
    from altgrad.training import machine

    machine.use_compile_cache(machine.compile_cache(project_root()))
    loops.available()
    loops.load(update_cpu.SOURCE, definitions=update_cpu.DEFINITIONS)


if __name__ == "__main__":
    main()
