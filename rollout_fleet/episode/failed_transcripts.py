"""The transcript of a group whose samples all failed; it travels with the report of the failure."""

import logging

from common.rollouts import Group
from common.transcript_maker import TokenText, transcript_line
from common.transcripts import FAILED_BYTES
from rollout_fleet.episode.rendering import Renderer

logger = logging.getLogger(__name__)


class FailedTranscripts:
    """Makes them on the node, which has the tokenizer."""

    def __init__(self, renderer: Renderer, node_id: str) -> None:
        self._node_id, self._text = node_id, TokenText(renderer.text)
        self._logged = False

    def line(self, group: Group) -> bytes:
        """That of the group's longest sample, at most FAILED_BYTES; b'' when there is none. Raises nothing."""
        if not group.samples:
            return b""
        try:
            index, sample = max(enumerate(group.samples), key=lambda pair: pair[1].tokens.entries())
            facts = {"serial": group.serial, "sample": index, "node_id": self._node_id, "why": ["failed"]}
            return transcript_line(sample, self._text, FAILED_BYTES, **facts)
        except Exception as error:
            if not self._logged:
                logger.warning("transcripts of failed groups are left out: %r", error)
            self._logged = True
            return b""
