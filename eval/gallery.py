"""Rounds of a TALON trace, request by request, in the form that the report page steps through."""

from collections.abc import Callable, Sequence

from eval.picture import name_of, visible
from eval.trace import DraftRound, TraceError

MOST_ROUNDS = 40  # of one request, to keep the page small
SHOWN_QUESTION = 600  # characters


def gallery(rounds: Sequence[DraftRound], decode: Callable[[list[int]], str], requests: int, questions: dict[str, str]) -> list[dict]:
    """Up to `requests` requests with their rounds, each of another prompt set as long as there are others.

    questions: {"set/prompt id": text}, for requests that eval/serve.py sent. A request: {name, question, rounds: [{names, parents, depths,
    p, accepted, text, new, degraded}]}. names: visible text of each node, the bonus token last; p: draft probability of each node given its
    parent, in percent; text: what was generated before; new: what the round added.
    Raises TraceError when the trace holds no draft tree.
    """
    by_request: dict[str, list[DraftRound]] = {}
    for one in rounds:
        by_request.setdefault(one.rid, []).append(one)
    # One round is no story, and a request cut off in the middle would begin with a later round.
    usable = {rid: found for rid, found in by_request.items() if found[0].round == 0 and any(len(one.tokens) > 1 for one in found)}
    if not usable:
        raise TraceError("The trace holds no draft tree; send at least one request of a few tokens to the TALON server.")
    return [request(rid, usable[rid][:MOST_ROUNDS], decode, questions) for rid in spread(list(usable), requests)]


def spread(rids: list[str], count: int) -> list[str]:
    """`count` of them, one of each set in turn; eval/serve.py names requests set/prompt."""
    sets: dict[str, list[str]] = {}
    for rid in rids:
        sets.setdefault(rid.partition("/")[0] if "/" in rid else "", []).append(rid)
    chosen: list[str] = []
    while len(chosen) < min(count, len(rids)):
        for found in sets.values():
            if found and len(chosen) < count:
                chosen.append(found.pop(0))
    return chosen


def request(rid: str, rounds: Sequence[DraftRound], decode: Callable[[list[int]], str], questions: dict[str, str]) -> dict:
    generated, shown = [rounds[0].tokens[0]], []
    for one in rounds:
        new = [one.tokens[node] for node in one.accepted[1:]] + [one.bonus]
        shown.append(
            {
                "names": [name_of(token, decode) for token in [*one.tokens, one.bonus]],
                "parents": one.parents,
                "depths": one.depths,
                "p": [round(100 * one.probability(node), 2) for node in range(len(one.tokens))],
                "accepted": one.accepted,
                "text": decode(generated),
                "new": [visible(decode([token]), space=" ") for token in new],
                "degraded": one.degraded,
            }
        )
        generated += new
    name = rid.rpartition(" #")[0] or rid  # set/id c=1 T=0 #session
    question = questions.get(name.rsplit(" ", 2)[0], "")
    return {"name": name, "question": question if len(question) <= SHOWN_QUESTION else question[:SHOWN_QUESTION] + "…", "rounds": shown}
