"""A socket's path has at most 107 bytes, and $TMPDIR of a batch system may have more: the engine then uses /tmp."""

import logging
import os
import tempfile

logger = logging.getLogger(__name__)

LONGEST_PATH = 107  # bytes of sockaddr_un.sun_path without its end, unix(7)
NAME = 1 + 36  # a slash and a UUID, as vllm.utils.network_utils.get_open_zmq_ipc_path; multiprocessing's are shorter
SHORT = "/tmp"


def variables() -> dict[str, str]:
    """TMPDIR for processes that listen on sockets in it, when the temporary folder's path is too long for that."""
    folder = tempfile.gettempdir()
    if len(os.fsencode(folder)) + NAME <= LONGEST_PATH:
        return {}
    logger.warning("%s is too long for sockets (%d bytes at most): using %s", folder, LONGEST_PATH - NAME, SHORT)
    return {"TMPDIR": SHORT}


def shorten() -> None:
    """The same for this process and its children."""
    if found := variables():
        os.environ.update(found)
        tempfile.tempdir = None  # it is looked up again
