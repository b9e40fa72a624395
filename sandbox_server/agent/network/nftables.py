"""Runs commands of `nft` with the library of nftables, in the network namespace in which the object was made."""

from __future__ import annotations

import ctypes
import errno

_LIBRARY = "libnftables.so.1"


class Nftables:
    """The packet filter of one network namespace.

    Raises:
        OSError: the library of nftables is not installed.
    """

    def __init__(self) -> None:
        try:
            library = ctypes.CDLL(_LIBRARY)
        except OSError:
            raise OSError(errno.ENOENT, "the library of nftables is missing (%s; on Debian, the package libnftables1)" % _LIBRARY) from None
        library.nft_ctx_new.restype = ctypes.c_void_p
        library.nft_ctx_get_error_buffer.restype = ctypes.c_char_p
        self._library = library
        self._context = ctypes.c_void_p(library.nft_ctx_new(ctypes.c_uint32(0)))
        library.nft_ctx_buffer_error(self._context)
        library.nft_ctx_buffer_output(self._context)

    def run_commands(self, commands: str) -> None:
        """Run commands, in one step: all of them take effect, or none.

        Raises:
            OSError: the kernel has refused them. The text is what nftables says.
        """
        if self._library.nft_run_cmd_from_buffer(self._context, commands.encode("ascii")) != 0:
            text = self._library.nft_ctx_get_error_buffer(self._context).decode("utf-8", "replace").strip()
            raise OSError(errno.EINVAL, "nftables: %s" % (text.splitlines()[0] if text else "it gave no reason"))
