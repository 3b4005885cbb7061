"""SGLang's plain server with --enable-deterministic-inference on a CPU, as the oracle for sampling seeds.

SGLang 0.5.23 refuses that flag with the CPU's attention backend and would exchange PyTorch's operators for GPU kernels. Without those two
only the seeded sampler is left of it, unchanged. A spawned process imports the main script again, so the changes hold in the scheduler.
"""

import os
import sys

from sglang.srt import batch_invariant_ops
from sglang.srt.arg_groups import choices

choices.add_deterministic_attention_backend_choices(["intel_amx"])
choices.add_radix_supported_deterministic_attention_backend_choices(["intel_amx"])
batch_invariant_ops.enable_batch_invariant_mode = lambda *_, **__: None


if __name__ == "__main__":
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    words = ["--enable-deterministic-inference", "--attention-backend", "intel_amx"]
    try:
        run_server(prepare_server_args([*sys.argv[1:], *words]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
