"""No stage, but what training would do first: build its loops in C++, which `make repro` has done meanwhile.

Compiling them keeps a core busy for a good part of a minute, and tokenizing another. Nobody waits for this process, and
nothing is lost if it fails: who needs loops that are not there builds them, and says what stands in the way.
"""

from altgrad.common.fingerprint import project_root


def main() -> None:
    """Build the loops of all packages where training looks for them, those first that a step takes first."""
    from altgrad.numerics import loops, sums
    from altgrad.optim import update_cpu
    from altgrad.training import machine

    machine.use_compile_cache(machine.compile_cache(project_root()))
    loops.available()
    loops.load(update_cpu.SOURCE, definitions=update_cpu.DEFINITIONS)
    loops.load(sums.SOURCE, definitions=sums.DEFINITIONS)


if __name__ == "__main__":
    main()
