"""The writing and sending of a replica, in a thread of each rank."""

from collections.abc import Callable, Sequence
from typing import Any

from shardhet.checkpoint.format import files
from shardhet.checkpoint.format.errors import damaged
from shardhet.checkpoint.format.writing import Report
from shardhet.checkpoint.replicas.transfer import Stream, all_to_all_bytes, of_files
from shardhet.checkpoint.state.job import CALL, Job
from shardhet.records.layout import Span


class Copying(Job):
    """One replica from the files of its ranks to complete folders on all nodes."""

    def __init__(
        self,
        *given: Any,
        keeper_of: Sequence[int | None],
        remove_others: Callable[[], None],
        **named: Any,
    ) -> None:
        """``keeper_of`` says which position keeps another copy; the rest is as for ``Job``."""
        super().__init__(*given, **named)
        self._keeper_of = keeper_of
        self._remove_others = remove_others

    def run(self) -> None:
        """As ``Job.run``; those that lead then remove the replicas before."""
        super().run()
        if self._leads:
            self._remove_others()

    def _pass_on(self, reports: Sequence[Report | None]) -> None:
        """Send this rank's file, and write those that it keeps."""
        if self._channel is None:
            return
        folder, here = files.unfinished_path(self._path), self._ranks.position
        outgoing: dict[int, Stream] = {}
        kept: dict[int, Report] = {}
        for i, report in enumerate(reports):
            keeper = self._keeper_of[i]
            if report is None or keeper is None:
                continue
            if i == here:
                whole = Span(0, report.facts.num_bytes)
                outgoing[keeper] = of_files([(folder / report.file, whole)])
            elif keeper == here:
                kept[i] = report
        copies: dict[int, files.DigestingFile] = {}

        def open_copies() -> None:
            for i, report in kept.items():
                copies[i] = files.DigestingFile(folder / report.file)

        self._among.agree(open_copies, call=CALL)
        incoming = {
            i: Stream(report.facts.num_bytes, copies[i].write) for i, report in kept.items()
        }
        try:
            all_to_all_bytes(self._channel, outgoing, incoming)
            for each in (*outgoing.values(), *incoming.values()):
                each.check()
            for i, copy in copies.items():
                copy.finish()
                if copy.digest != kept[i].facts.digest:
                    raise damaged(copy.path, "the received bytes differ from those sent")
        finally:
            for copy in copies.values():
                copy.abandon()
