"""Which writer a hook writes to."""

from __future__ import annotations

from typing import Any

from torchhooks.summary import SummaryWriterCache


class WriterTarget:
    """Where one hook writes: to the writer it was given, or to that of a folder, opened when the hook begins.

    Args:
        output_dir: the folder; its writer comes from the cache and is closed with the loop.
        summary_writer: the writer; it is flushed with the loop and stays open.

    Raises:
        ValueError: both were given.
    """

    def __init__(self, output_dir: Any, summary_writer: Any) -> None:
        if output_dir is not None and summary_writer is not None:
            raise ValueError(f"output_dir={output_dir!r}, summary_writer={summary_writer!r}: give one, not both")
        self._output_dir = output_dir
        self._given = summary_writer
        self.writer: Any = None
        """The writer, from :meth:`open` to :meth:`close`; ``None`` if there is nowhere to write to."""

    def open(self) -> Any:
        """Get the writer, and return it."""
        self.writer = self._given
        if self._output_dir is not None:
            self.writer = SummaryWriterCache.get(self._output_dir)
        return self.writer

    def close(self) -> None:
        """Flush the writer, and close it if it was opened here."""
        if self.writer is not None:
            self.writer.flush()
        if self._output_dir is not None:
            SummaryWriterCache.close(self._output_dir)
        self.writer = None
