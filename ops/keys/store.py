"""The keys of a machine: its own pair, and the public keys of the machines that may join its coordinator.

They are pyzmq's certificate files. The secret part never leaves the machine that made it.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shlex
import stat
import struct
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from zmq.auth import create_certificates, load_certificate
from zmq.utils import z85

from fedemu.ops.homes import expanded, keys_folder
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.host.files import usable, write_for_people
from fedemu.protocol.host.paths import exists, is_folder
from fedemu.protocol.transport.curve import KEY_CHARACTERS, require_curve

logger = logging.getLogger(__name__)

_OWN: Final = "machine"
_PUBLIC, _SECRET = ".key", ".key_secret"
_EDGE: Final = "role = edge"
"""The line of a file that approves an edge."""
_ANOTHER: Final = "name another folder with --keys"
_OF_OTHERS: Final = 0o077
"""The modes that a secret key must not have."""
_PASSING: Final = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EAGAIN, errno.EIO, errno.ESTALE, errno.ETIMEDOUT}
)
"""What hinders a look at a file for a while: no free descriptor or memory, or a network behind which the file lies."""
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class KeyFolder:
    """A folder with the pair ``machine.key`` and ``machine.key_secret``, and ``approved/NAME.key`` for each machine."""

    path: Path
    option: str = ""
    """What commands need to find it, such as `` --keys DIR``. Empty if they find it by themselves."""

    @classmethod
    def of(cls, named: str, environment: Mapping[str, str]) -> KeyFolder:
        """The folder that is ``named``; else that of ``FEDEMU_KEYS``; else one in the user's configuration."""
        if named:
            return cls(expanded(named), f" --keys {shlex.quote(named)}")
        return cls(keys_folder(environment))

    @property
    def public_file(self) -> Path:
        """The file that other machines may have."""
        return self.path / (_OWN + _PUBLIC)

    @property
    def secret_file(self) -> Path:
        """The file that stays on this machine."""
        return self.path / (_OWN + _SECRET)

    @property
    def approved_folder(self) -> Path:
        """The folder with the public keys of other machines."""
        return self.path / "approved"

    def new(self) -> str:
        """Make this machine's pair of keys, and return the public key.

        Raises ConfigurationError if there is one, also if another process makes it at the same time, or if the file
        system would let other users read the secret key.
        """
        require_curve()
        if exists(self.secret_file) or exists(self.public_file):
            raise self._taken()
        with usable(self.path, _ANOTHER), _without_trace(self.path):
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.TemporaryDirectory(dir=self.path, prefix=".new-") as private:  # its mode is 0700
                while True:
                    public, secret = map(Path, create_certificates(private, _OWN))
                    key = _load(public)[0]
                    if key[0].isalnum():  # so that no command takes it for an option
                        break
                secret.chmod(0o600)
                public.chmod(0o644)
                if _mode(secret) & _OF_OTHERS:
                    raise ConfigurationError(
                        f"the file system of {self.path} keeps no modes of files, so other users could read the secret "
                        f"key there; {_ANOTHER}"
                    )
                try:
                    _place(secret, self.secret_file)
                except FileExistsError:
                    raise self._taken() from None
                os.rename(public, self.public_file)
        return key

    def _taken(self) -> ConfigurationError:
        return ConfigurationError(
            f"there is a key in {self.path} already (`fedemu keys list{self.option}` shows it); "
            f"remove {self.public_file.name} and {self.secret_file.name} to make another"
        )

    def pair(self) -> tuple[str, str]:
        """The public and the secret key of this machine. Raises ConfigurationError if they cannot be used."""
        require_curve()
        if not exists(self.secret_file):
            raise ConfigurationError(f"there is no key in {self.path}; make one with `fedemu keys new{self.option}`")
        public, secret = _load(self.secret_file)
        if secret is None:
            raise ConfigurationError(
                f"{self.secret_file} has no secret key; make a new pair with `fedemu keys new{self.option}`"
            )
        if (mode := _mode(self.secret_file)) & _OF_OTHERS:
            raise ConfigurationError(
                f"other users can read {self.secret_file} (its mode is {mode:04o}); chmod 600 it, "
                "or make a new pair if somebody may have"
            )
        return public, secret

    def require_own(self) -> None:
        """Raise ConfigurationError if other users can write here: they could approve machines.

        The superuser may. In a user namespace that does not know the owner of a folder, he has the number 65534, and
        counts as another user.
        """
        for folder in (self.path, self.approved_folder):
            if not exists(folder):
                continue
            found = folder.stat()
            if found.st_uid not in (os.getuid(), 0):
                raise ConfigurationError(
                    f"{folder} belongs to another user (number {found.st_uid}), who could let machines in; chown it, "
                    f"or {_ANOTHER}"
                )
            if found.st_mode & 0o022:
                raise ConfigurationError(
                    f"other users can write to {folder}, so they could let machines in; chmod go-w it"
                )

    def approve(self, name: str, key: str, edge: bool = False) -> None:
        """Let the machine ``name`` with the public key ``key`` join, also a run that is on. It may be an ``edge``."""
        _check_name(name)
        if others := [other for other, known in self.approved().items() if known == key and other != name]:
            raise ConfigurationError(f"this key is approved already, as {others[0]}")
        file = self.approved_folder / (name + _PUBLIC)
        with usable(file, _ANOTHER):
            self.approved_folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            role = f"    {_EDGE}\n" if edge else ""
            text = f'metadata\n    name = {name}\n{role}curve\n    public-key = "{key}"\n'
            write_for_people(file, text)

    def revoke(self, name: str) -> str:
        """Take the approval of the machine ``name`` back, also in a run that is on. Returns its key."""
        approved = self.approved()
        if name not in approved:
            known = f"approved are: {', '.join(sorted(approved))}" if approved else "none is"
            raise ConfigurationError(f"no machine {name!r} is approved in {self.path}; {known}")
        (self.approved_folder / (name + _PUBLIC)).unlink(missing_ok=True)
        return approved[name]

    def approved(self) -> dict[str, str]:
        """The approved public keys by the names of their machines. A file that cannot be read approves nobody.

        Raises OSError if it cannot be read for a reason that passes.
        """
        keys = {}
        for file in self._approvals():
            try:
                keys[file.name.removesuffix(_PUBLIC)] = _load(file)[0]
            except ConfigurationError as error:
                if isinstance(error.__cause__, OSError) and is_passing(error.__cause__):
                    raise error.__cause__ from None
                logger.warning("%s; it approves nobody", error)
        return keys

    def _approvals(self) -> list[Path]:
        try:
            return sorted(file for file in self.approved_folder.iterdir() if file.name.endswith(_PUBLIC))
        except OSError as error:
            if is_passing(error):
                raise
            return []

    def edges(self) -> list[str]:
        """The names of the approved machines that may be edges. Raises OSError as ``approved`` does."""
        return [name for name in self.approved() if _is_edge(self.approved_folder / (name + _PUBLIC))]


def _place(file: Path, path: Path) -> None:
    """Give a whole file another name, in the same file system, which no file has yet. The first name may stay.

    Raises FileExistsError if a file has the name, and another OSError if the system refuses.
    """
    try:
        os.link(file, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links, or the reason why the next lines fail, too
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        os.rename(file, path)


@contextmanager
def _without_trace(folder: Path) -> Iterator[None]:
    """If the block fails, the folders that it has made, as far as ``folder``, are removed again if they are empty."""
    made = [each for each in (folder, *folder.parents) if not exists(each)]
    try:
        yield
    except BaseException:
        with suppress(OSError):
            for each in made:
                each.rmdir()
        raise


def _mode(file: Path) -> int:
    """Who may read, write and execute a file."""
    return stat.S_IMODE(file.stat().st_mode)


def _is_edge(file: Path) -> bool:
    """Whether an approval is one for an edge."""
    try:
        return any(line.strip() == _EDGE for line in file.read_text(encoding="utf-8").splitlines())
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and is_passing(error):
            raise
        return False


def is_passing(error: OSError) -> bool:
    """Whether an error tells nothing about a file, because the system cannot look at it at this moment."""
    return error.errno in _PASSING


def read_public(text: str) -> str:
    """The public key that ``text`` is, or that is in the file ``text``. Raises ConfigurationError if there is none."""
    if len(text) == KEY_CHARACTERS and not exists(Path(text)):
        _check_key(text, "this")
        return text
    path = expanded(text)
    if path.suffix == _SECRET:
        raise ConfigurationError(
            f"{path} has a secret key, which stays on its machine; give the file {path.with_suffix(_PUBLIC).name}"
        )
    return _load(path)[0]


def _load(path: Path) -> tuple[str, str | None]:
    """The public and, if there is one, the secret key of a certificate file."""
    if path.is_char_device():
        raise ConfigurationError(f"{path} is a device of the system, and holds no key")
    try:
        public, secret = load_certificate(path)
    except (OSError, ValueError, IndexError) as error:
        if not exists(path):
            raise ConfigurationError(f"{str(path)!r} is neither a public key of 40 characters nor a file") from error
        if is_folder(path):
            raise ConfigurationError(f"{str(path)!r} is a folder; give the file in it, such as machine.key") from error
        raise ConfigurationError(f"{path} has no public key") from error
    texts = [None if key is None else key.decode("ascii", "replace") for key in (public, secret)]
    for key in texts:
        if key is not None:
            _check_key(key, f"what {path} has")
    assert texts[0] is not None
    return texts[0], texts[1]


def _check_key(key: str, what: str) -> None:
    try:
        if len(z85.decode(key.encode("ascii"))) == 32:
            return
    except (ValueError, KeyError, UnicodeError, struct.error):
        pass
    raise ConfigurationError(f"{what} is no key: it must be 40 characters of Z85, as `fedemu keys list` shows them")


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ConfigurationError(
            f"{name!r} is no name for a machine; take letters, digits, dots, dashes and underscores, at most 64"
        )
