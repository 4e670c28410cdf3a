"""What `make gpu` writes, of a card that does not exist."""

from __future__ import annotations

from typing import Any

SESSION = {"torch": "2.11.0", "driver": "580.1", "triton": "3.6", "commit": "0123456789abcdef", "command": "make gpu"}
PARTS = {
    "step_s": 0.01, "step_p90_s": 0.011, "evaluate_s": 0.2, "observe_s": 0.3, "setup_s": 2.0, "diagnose_s": 4.0,
    "first_s": 30.0,
}  # fmt: skip


def record(**changes: Any) -> dict[str, Any]:
    """Return what `make gpu` writes, of a card that does not exist."""
    sizes = {"layers": 2, "width": 64, "heads": 2, "context": 64}
    step = {"model": "gpt-124m", "batch": 16, "context": 1024, "step_ms": 40.0, "matmul_operations_per_s": 3e14,
            "tokens_per_s": 409600, "session": "1"}  # fmt: skip
    return {
        "device": "An Imaginary GPU", "on_gpu": True, "threads": 16, "sessions": {"1": SESSION},
        "limits": {"copy_bytes_per_s": 3e12, "bf16_gemm_operations_per_s": 8e14, "fp32_gemm_operations_per_s": 5e13,
                   "session": "1"},
        "operands": [{"name": "E4M3, a scale per tensor", "elements": 1 << 20, "call_ms": 0.3, "gb_per_s": 1500.0,
                      "over_copy": 0.5, "over_copy_quartiles": [0.49, 0.51], "session": "1"},
                     {"name": "E2M1", "elements": 1 << 20, "absent": "failed: no kernel", "session": "1"}],
        "steps": [step | {"name": "bf16", "over_bf16": 1.0, "over_bf16_quartiles": [1, 1]},
                  step | {"name": "E3M4", "over_bf16": 1.07, "over_bf16_quartiles": [1.06, 1.08]}],
        "memory": [{"model": "gpt-124m", "batch": 16, "name": name, "state_mb": 99.0, "peak_mb": peak, "session": "1"}
                   for name, peak in (("bf16", 200.0), ("E3M4", None))],
        "optimizers": [{"model": "gpt-124m", "format": "E4M3", "name": "rung", "parameters": 124e6, "step_ms": 20.0,
                        "over_adamw": 1.25, "over_adamw_quartiles": [1.2, 1.3], "over_rule": 0.5,
                        "state_mb": 97.0, "peak_mb": None,
                        "session": "1"}],
        "at_once": [{"name": f"{jobs} at a time", "model": "pico", "jobs": jobs, "runs_per_hour": rate, "first_s": 9.0,
                     "runs_per_hour_range": [rate - 9, rate + 9], "session": "1"}
                    for jobs, rate in ((1, 900), (8, 3000))],
        "parts_of_runs": [{"name": "pico", "format": "E4M3", "vocabulary": 1024, "parameters": 168_000, "sizes": sizes,
                           "batch": 16, "tokens_per_s": 102400, "steps": 24, "session": "1", **PARTS}],
        "items": {"step: E7M0": {"took_s": 115.0, "failed": "had not ended after 115 s", "session": "1"}},
        **changes,
    }  # fmt: skip
