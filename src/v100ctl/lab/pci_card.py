"""A V100 on the PCI bus of a virtual machine: what its configuration space says, and registers enough to be recognised.

QEMU hands a device's accesses to another process (``x-pci-proxy-dev``, ``docs/devel/multi-process.rst`` of its source); here
they go to a thread that plays the card. To the guest's firmware and kernel it is a device like others: it has addresses, a link,
a NUMA node, and drivers are bound to it. It computes nothing, has no firmware and no memory; a driver gets as far as knowing its
chip. QEMU gives such a device 32-bit addresses only, so BAR1, which a real card has as large as its memory, is a window of 256
MiB, as in servers whose firmware places nothing above 4 GiB.
"""

from __future__ import annotations

import socket
import struct
import threading

# The protocol's messages (include/hw/remote/mpqemu-link.h): a number, padding, the size of what follows; then that.
_HEADER = struct.Struct("<i4xQ")
_CONFIG = struct.Struct("<IIi")
_ACCESS = struct.Struct("<QQI?3x")
_REPLY = struct.Struct("<i4xQQ")
_RETURN, _CONFIG_WRITE, _CONFIG_READ, _BAR_WRITE, _BAR_READ, _RESET = 1, 2, 3, 4, 5, 7

# The layout of a configuration space (include/uapi/linux/pci_regs.h).
_COMMAND, _STATUS, _REVISION, _CLASS, _BAR0, _SUBSYSTEM, _CAPABILITIES, _INTERRUPT_PIN = 4, 6, 8, 10, 0x10, 0x2C, 0x34, 0x3D
_POWER_CAPABILITY, _EXPRESS_CAPABILITY = 0x60, 0x78
_3D_CONTROLLER = 0x0302
#: Sizes of the memory areas, in bytes: registers, a window to the memory, and one to the card's own tables. A real card has its
#: third at the fourth place, since an address of 64 bits takes two; the driver misses one that is not beside the second.
BAR_SIZES = {0: 16 << 20, 1: 256 << 20, 2: 32 << 20}
# The first register, and the one that newer drivers look at: architecture 0x14, implementation 0, revision A1, which is GV100.
_REGISTERS = {0x0: 0x140000A1, 0xA00: 0x140A1000}


class PlayedCard(threading.Thread):
    """One card. Its thread ends when QEMU does.

    Args:
        pci_id: Vendor and device, ``10de:1db1``.
        subsystem_id: Vendor and device of the board.

    Attributes:
        remote: The socket that QEMU inherits; :meth:`run` serves the other end.
    """

    def __init__(self, pci_id: str, subsystem_id: str) -> None:
        super().__init__(name=f"card {pci_id}", daemon=True)
        self._connection, self.remote = socket.socketpair()
        self._initial, self._mask = _configuration(pci_id, subsystem_id)
        self._space = bytearray(self._initial)

    def run(self) -> None:
        """Answers until the other end is closed."""
        with self._connection:
            while (head := self._receive(_HEADER.size)) is not None:
                command, size = _HEADER.unpack(head)
                body = self._receive(size)
                if body is None:
                    return
                # What has no answer: where the machine's memory lies, and how the card would raise interrupts.
                value = self.answer(command, body)
                if value is not None:
                    self._connection.sendall(_REPLY.pack(_RETURN, 8, value))

    def answer(self, command: int, body: bytes) -> int | None:
        """What a message is answered with; ``None`` for one that waits for no answer."""
        if command in (_CONFIG_READ, _CONFIG_WRITE):
            address, value, length = _CONFIG.unpack(body)
            if command == _CONFIG_READ:
                return int.from_bytes(self._space[address : address + length], "little")
            for offset, byte in enumerate(value.to_bytes(4, "little")[:length], start=address):
                mask = self._mask[offset]
                self._space[offset] = self._space[offset] & ~mask | byte & mask
            return 0
        if command == _BAR_READ:
            address, _, _, _ = _ACCESS.unpack(body)
            return _REGISTERS.get(address - self.bar(0), 0)
        if command == _BAR_WRITE:
            return 0
        if command == _RESET:
            self._space[:] = self._initial
            return 0
        return None

    def bar(self, index: int) -> int:
        """The address that the firmware gave to a memory area."""
        return int.from_bytes(self._space[_BAR0 + 4 * index : _BAR0 + 4 * index + 4], "little")

    def _receive(self, size: int) -> bytes | None:
        """So many bytes; ``None`` at the end. Descriptors that come along are for sharing memory, and dropped."""
        found = b""
        while len(found) < size:
            try:
                part = self._connection.recv(size - len(found))
            except ConnectionError:
                return None
            if not part:
                return None
            found += part
        return found


def _configuration(pci_id: str, subsystem_id: str) -> tuple[bytes, bytes]:
    """A configuration space after a reset, and which of its bits can be written."""
    space, mask = bytearray(256), bytearray(256)

    def put(offset: int, size: int, value: int, writable: int = 0) -> None:
        space[offset : offset + size] = value.to_bytes(size, "little")
        mask[offset : offset + size] = writable.to_bytes(size, "little")

    for offset, text in ((0, pci_id), (_SUBSYSTEM, subsystem_id)):
        vendor, _, device = text.partition(":")
        put(offset, 2, int(vendor, 16))
        put(offset + 2, 2, int(device, 16))
    # Decoding of memory, mastering the bus, parity, system errors, and interrupts off.
    put(_COMMAND, 2, 0, 0x0546)
    # It has a list of capabilities.
    put(_STATUS, 2, 0x0010)
    put(_REVISION, 1, 0xA1)
    put(_CLASS, 2, _3D_CONTROLLER)
    for index, size in BAR_SIZES.items():
        put(_BAR0 + 4 * index, 4, 0, (1 << 32) - size)
    put(_CAPABILITIES, 1, _POWER_CAPABILITY)
    put(_INTERRUPT_PIN - 1, 1, 0xFF, 0xFF)
    put(_INTERRUPT_PIN, 1, 1)
    # Power management, version 3: states D0 and D3.
    put(_POWER_CAPABILITY, 4, 0x01 | _EXPRESS_CAPABILITY << 8 | 0x0003 << 16)
    put(_POWER_CAPABILITY + 4, 2, 0x0008, 0x0003)
    # PCI Express, version 2, an endpoint, with payloads of up to 256 bytes; its link can do, and does, 16 lanes at 8 GT/s.
    put(_EXPRESS_CAPABILITY, 4, 0x10 | 0x0002 << 16)
    put(_EXPRESS_CAPABILITY + 4, 4, 1)
    put(_EXPRESS_CAPABILITY + 8, 2, 0x2810, 0x78FF)
    put(_EXPRESS_CAPABILITY + 12, 4, 16 << 4 | 3)
    put(_EXPRESS_CAPABILITY + 16, 2, 0, 0x0FFF)
    put(_EXPRESS_CAPABILITY + 18, 2, 16 << 4 | 3)
    put(_EXPRESS_CAPABILITY + 44, 4, 0x0E)
    put(_EXPRESS_CAPABILITY + 48, 2, 3, 0xFFFF)
    return bytes(space), bytes(mask)
