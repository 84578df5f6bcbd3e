"""Prompts that two models answer differently, in lines for people."""

from quantry.report.ci import differing


def test_the_first_prompts_with_other_answers_are_shown() -> None:
    same = {"id": "0", "base": "yes", "quantized": "yes", "agree": True}
    other = [{"id": str(n), "base": "a b\n c", "quantized": "x" * 200, "agree": False} for n in range(1, 8)]
    lines = differing({"records": [same, *other]})
    assert lines[0] == f"1: '{'x' * 80} ...', in 16 bit 'a b c'"
    assert (len(lines), lines[-1]) == (6, "and 2 more")
    assert differing({"records": [same]}) == []
