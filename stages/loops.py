"""No stage: `make repro` runs this beside tokenizing, to build the C++ loops that training would build first.

Compiling them takes one core most of a minute. Nobody waits for this process, and nothing is lost if it fails: training
builds loops that are missing, and says what stands in the way.
"""

from altgrad.common.fingerprint import project_root


def main() -> None:
    """Build the loops of all packages where training looks for them, in the order in which a step uses them."""
    from altgrad.numerics import loops, sums
    from altgrad.optim import update_cpu
    from altgrad.training import machine

    machine.use_compile_cache(machine.compile_cache(project_root()))
    loops.available()
    loops.load(update_cpu.SOURCE, definitions=update_cpu.DEFINITIONS)
    loops.load(sums.SOURCE, definitions=sums.DEFINITIONS)


if __name__ == "__main__":
    main()
