"""One SGLang server with TALON and one head: the accept length that it counts on held-out prompts."""

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from eval import serve
from eval.client import Client, RequestError
from eval.servers import ServerError
from eval.servers import serve as running
from eval.stats import figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, epilog="Every option is one of eval/serve.py; its first TALON setting is served.")
    _, words = parser.parse_known_args()
    args = serve.parse_args(words)
    try:
        serve.check_folders(args)
        sets = serve.load_sets(args)
        spec = next(spec for spec in serve.server_specs(args) if spec.algorithm == "TALON")
        with running(spec, log_path=args.out.with_suffix(".log")) as server, Client(server.url) as client:
            serve.warm_up(client, args)
            answered = {}
            for name, prompts in sets.items():
                answered[name] = serve.measure_set(spec, client, prompts, args, lambda: None)
                print(f"{spec.name}: {name}, {len(prompts)} prompts in {answered[name].wall_s:.0f} s", flush=True)
    except (serve.UsageError, ServerError, RequestError) as error:
        sys.exit(f"vs_speculators: {error}")
    groups = {**{name: [name] for name in sets}, "all": list(sets)}
    summary = {spec.name: {name: asdict(figures(answered, None, group)) for name, group in groups.items()}}
    temporary = args.out.with_name(args.out.name + ".tmp")
    temporary.write_text(json.dumps({"max_new_tokens": args.max_new_tokens, "summary": summary}, indent=1) + "\n")
    os.replace(temporary, args.out)


if __name__ == "__main__":
    main()
