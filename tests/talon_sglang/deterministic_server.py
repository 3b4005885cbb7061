"""SGLang's plain server with --enable-deterministic-inference on a CPU, as the oracle for sampling seeds.

SGLang 0.5.23 refuses that flag with the CPU's attention backend and would exchange PyTorch's operators for GPU kernels. Without those two
only the seeded sampler is left of it, unchanged. (The scheduler is forked from this process, so it has the changes too.)
"""

import runpy
import sys
from pathlib import Path

main = runpy.run_path(str(Path(__file__).parents[1] / "forking_server.py"))["main"]

from sglang.srt import batch_invariant_ops  # noqa: E402
from sglang.srt.arg_groups import choices  # noqa: E402

if __name__ == "__main__":
    choices.add_deterministic_attention_backend_choices(["intel_amx"])
    choices.add_radix_supported_deterministic_attention_backend_choices(["intel_amx"])
    batch_invariant_ops.enable_batch_invariant_mode = lambda *_, **__: None
    main([*sys.argv[1:], "--enable-deterministic-inference", "--attention-backend", "intel_amx"])
