"""The cases as tests: a kernel author adds one file.

    from regard.judge.convention import Convention
    from regard.judge.plugin import AttentionCases

    class TestMine(AttentionCases):
        attention = staticmethod(my_attention)
        convention = Convention(library="torch", causal="causal")
        level = "kernel"

Every case is a test of its own: red with the maps and what to change, skipped if it was
not asked. Or, for all cases in one test, the fixture that pytest finds by itself:

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
    """A test for each case; say which attention, and its convention."""

    attention: ClassVar[Any]
    convention: ClassVar[Convention | None] = None
    level: ClassVar[str] = "complete"
    seed: ClassVar[int] = 0
    limit: ClassVar[float] = 30
    judged: ClassVar[dict[type, dict[str, Verdict]]] = {}  # once for each class

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Make a test of every case of the level."""
        from regard.judge.judgement import choose  # noqa: PLC0415 (pytest starts fast)

        if "regard_case" in metafunc.fixturenames:
            names = [case.name for case in choose(type(self).level)]
            metafunc.parametrize("regard_case", names)

    def test_attention(self, regard_case: str) -> None:
        """Fail with everything that is known about the pitfall."""
        found = self.judge()[regard_case]
        if found.status == "failed":
            pytest.fail(found.explain(), pytrace=False)
        if found.status != "passed":
            pytest.skip(found.note())

    @classmethod
    def judge(cls) -> dict[str, Verdict]:
        """Return the verdicts by name."""
        from regard.judge.judgement import check  # noqa: PLC0415

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
    """Return a function that judges an attention, and fails the test if it must."""
    from regard.judge.judgement import check  # noqa: PLC0415

    def run(
        fn: Attention, convention: Convention | None = None, *, level: str = "complete"
    ) -> Report:
        report = check(fn, convention, level=level)
        if not report.ok:
            pytest.fail(str(report), pytrace=False)
        return report

    return run
