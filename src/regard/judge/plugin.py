"""Run the cases with pytest: one class in a test file.

    from regard.judge.convention import Convention
    from regard.judge.plugin import AttentionCases

    class TestMine(AttentionCases):
        attention = staticmethod(my_attention)
        convention = Convention(library="torch", causal="causal")
        level = "kernel"

Every case becomes a separate test. It fails with the heatmaps and what to change, and
is skipped if it was not asked. Or run all cases in one test, with a fixture:

    def test_mine(regard_check):
        regard_check(my_attention, level="basic")

Next: inputs.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

if TYPE_CHECKING:
    from regard.judge.convention import Attention, Convention
    from regard.judge.report import Report, Verdict


class AttentionCases:
    """Base class with one test per case; set attention and convention."""

    attention: ClassVar[Any]
    convention: ClassVar[Convention | None] = None
    level: ClassVar[str] = "complete"
    seed: ClassVar[int] = 0
    limit: ClassVar[float] = 30
    judged: ClassVar[dict[type, dict[str, Verdict]]] = {}  # cache, by class

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Parametrize the test with all cases of the level."""
        from regard.judge.run_check import order_cases  # noqa: PLC0415 (pytest starts fast)

        if "regard_case" in metafunc.fixturenames:
            words = type(self).convention
            stored = words.storage.kind if words and words.storage else ""
            names = [case.name for case in order_cases(type(self).level, stored)]
            metafunc.parametrize("regard_case", names)

    def test_attention(self, regard_case: str) -> None:
        """Fail with the full explanation if the case failed."""
        found = self.judge()[regard_case]
        if found.status == "failed":
            pytest.fail(found.explain(), pytrace=False)
        if found.status != "passed":
            pytest.skip(found.note())

    @classmethod
    def judge(cls) -> dict[str, Verdict]:
        """Return the verdicts by case name; run the check once per class."""
        from regard.judge.run_check import check  # noqa: PLC0415

        if cls not in cls.judged:
            report = check(
                cls.attention,
                cls.convention,
                level=cls.level,
                seed=cls.seed,
                limit=cls.limit,
            )
            cls.judged[cls] = {each.name: each for each in report.verdicts}
        return cls.judged[cls]


@pytest.fixture
def regard_check() -> Callable[..., Report]:
    """Return a function that checks an attention and fails the test on a pitfall."""
    from regard.judge.run_check import check  # noqa: PLC0415

    def run(
        fn: Attention, convention: Convention | None = None, *, level: str = "complete"
    ) -> Report:
        report = check(fn, convention, level=level)
        if not report.ok:
            pytest.fail(str(report), pytrace=False)
        return report

    return run
