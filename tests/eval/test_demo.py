"""The demo's prompt split and its stage list; the stages themselves are tested where they live."""

import json

import pytest

from eval import demo
from eval.stages import StageError


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_starter_prompts_are_split_by_their_own_label(tmp_path):
    demo.split_prompts(demo.STARTER, tmp_path)
    train, held_out = rows(tmp_path / "prompts-train.jsonl"), rows(tmp_path / "prompts-eval.jsonl")
    assert len(held_out) == demo.EVAL_PROMPTS
    per_category = {category: sum(row["category"] == category for row in held_out) for category in {row["category"] for row in held_out}}
    assert len(set(per_category.values())) == 1
    assert len(per_category) == 6
    assert len(train) == sum(json.loads(line)["split"] == "train" for line in demo.STARTER.read_text().splitlines())
    assert not {str(row["turns"]) for row in train} & {str(row["turns"]) for row in held_out}


def test_other_files_have_their_last_rows_held_out(tmp_path):
    path = tmp_path / "sharegpt.json"
    talks = [
        {"id": "same", "conversations": [{"from": "human", "value": f"question {i}"}, {"from": "gpt", "value": "x"}]} for i in range(60)
    ]
    path.write_text(json.dumps(talks))
    demo.split_prompts(path, tmp_path)
    train, held_out = rows(tmp_path / "prompts-train.jsonl"), rows(tmp_path / "prompts-eval.jsonl")
    assert [row["turns"][0] for row in train + held_out] == [f"question {i}" for i in range(60)]
    assert len(held_out) == demo.EVAL_PROMPTS
    assert len({row["id"] for row in train + held_out}) == 60


@pytest.mark.parametrize("content, sentence", [(None, "does not exist"), ("one\ntwo\n", "holds 2 usable prompts; the demo needs at least")])
def test_unusable_prompt_files_are_one_sentence(tmp_path, content, sentence):
    path = tmp_path / "prompts.txt"
    if content is not None:
        path.write_text(content)
    with pytest.raises(StageError, match=sentence):
        demo.split_prompts(path, tmp_path)


def test_each_stage_reads_what_an_earlier_one_wrote(tmp_path):
    stages = demo.demo_stages(tmp_path, demo.RECIPE)
    assert [stage.name for stage in stages] == list(demo.NAMES)
    words = [" ".join(map(str, stage.command)) for stage in stages]
    for number, stage in enumerate(stages):
        to_look_at = stage.name in ("picture", "report")
        assert to_look_at or any(str(out) in later for out in stage.outputs for later in words[number + 1 :]), stage.name
        assert stage.sources, stage.name
        assert all(path.is_file() for path in [*stage.sources, *stage.inputs] if not path.is_relative_to(tmp_path)), stage.name


def test_listing_runs_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TALON_CACHE", str(tmp_path))
    assert demo.main(["--list"]) == 0
    printed = capsys.readouterr().out
    assert "deepspeed --log_level warning train/draft_head.py --recipe" in printed
    assert not (tmp_path / "smollm2-135m-instruct").exists()
