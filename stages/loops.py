"""No stage: `make repro` runs this beside tokenizing, to build the C++ loops that training would build first.

Compiling them takes one core most of a minute. Nobody waits for this process, and nothing is lost if it fails: training
builds loops that are missing, and says what stands in the way.
"""

from altgrad.common.fingerprint import project_root


def main() -> None:
    """Build the loops of all packages where training looks for them, those first that a step takes first."""
    from altgrad.numerics.cpu import kernels, sums
    from altgrad.optim import update_cpu
    from altgrad.training import machine

    machine.use_compile_cache(machine.compile_cache(project_root()))
    kernels.available()
    kernels.load(update_cpu.SOURCE, definitions=update_cpu.DEFINITIONS)
    kernels.load(sums.SOURCE, definitions=sums.DEFINITIONS)


if __name__ == "__main__":
    main()
