"""The vocabulary of a tokenizer.json, with control tokens out of reach of user text."""

from __future__ import annotations

from collections.abc import Iterable
import hashlib
import json
import re
import secrets
import threading
from typing import Any

import tokenizers

from flashrt_ros.errors import Corrupt, Incompatible, InvalidArgument
from flashrt_ros.text.detokenizer import token_decoder
from flashrt_ros.text.files import TextFiles
from flashrt_ros.text.vocabulary import check_text, Marks, NEVER

# Never guessable, so that no text can hold it; ids do not depend on it.
_ANCHOR = f'\U000ffffd{secrets.token_hex(16)}'

# Characters. The library keeps the interpreter while it encodes one text, and lets go of it for a
# batch: half a MiB would keep all other threads waiting for 0.2 to 0.8 s. A batch goes through
# the library's own threads, which a short text need not wait for.
_LONG = 4096


class HfVocabulary:
    """
    A ``tokenizer.json`` through the tokenizers library.

    *Control tokens* are the special tokens, the named ones (bos, eos, ...) and those added tokens
    that the chat template itself writes, such as ``<think>``. Text from users is never encoded
    to them: the tokenizer's own switch has it encode them as the ordinary text they are.
    """

    def __init__(self, files: TextFiles) -> None:
        self.named = files.named
        self._decode, self.first_bytes = token_decoder(files.tokenizer.get('decoder'))
        try:
            self._full = tokenizers.Tokenizer.from_str(files.raw)
        except Exception as error:  # the library raises plain Exception
            raise Corrupt(
                f'tokenizer.json cannot be read by tokenizers {tokenizers.__version__} ({error}); '
                'restore the file from its origin or upgrade tokenizers.') from error
        self._full.no_truncation()
        self._full.no_padding()
        self._add_missing(files)
        self.digest = _digest(files)
        self._added = self._full.get_added_tokens_decoder()
        vocab = files.tokenizer['model']['vocab']
        largest = len(vocab) - 1 if isinstance(vocab, list) else max(vocab.values(), default=-1)
        self.size = 1 + max([largest, *self._added])
        names = set(files.named.values())
        template = files.template or ''
        self._control = {
            token.content: (index, token) for index, token in self._added.items()
            if token.content and (
                token.special or token.content in names
                or (token.content in template and not token.content.isspace()))}
        self.control = _any_of(self._control)
        self._special = _any_of(
            content for content, (_, token) in self._control.items() if token.special)
        unknown = files.named.get('unk_token')
        self._forbidden = {
            index for text, (index, _) in self._control.items() if text != unknown}
        # A token that is matched after normalisation has spellings that a search cannot find.
        self._hidden = self._full.normalizer is not None and any(
            token.normalized for _, token in self._control.values())
        self._lock = threading.Lock()  # encode_special_tokens below is a switch on the object
        self._full.add_special_tokens([
            tokenizers.AddedToken(
                token.content, special=True, normalized=token.normalized, lstrip=token.lstrip,
                rstrip=token.rstrip, single_word=token.single_word)
            for _, token in self._control.values() if not token.special])
        self._full.add_tokens([tokenizers.AddedToken(_ANCHOR, special=False, normalized=False)])
        self._bytes: dict[int, bytes] = {}

    def _add_missing(self, files: TextFiles) -> None:
        """Add what only tokenizer_config.json declares, as transformers does, at the same ids."""
        known = {token.content for token in self._full.get_added_tokens_decoder().values()}
        names = set(files.named.values())
        for index, spec in sorted(files.extra.items()):
            content = spec['content']
            if content not in known:
                flags = {key: bool(spec[key]) for key in (
                    'single_word', 'lstrip', 'rstrip', 'normalized') if key in spec}
                special = bool(spec.get('special')) or content in names
                self._full.add_tokens([
                    tokenizers.AddedToken(content, special=special, **flags)])
                known.add(content)
            if self._full.token_to_id(content) != index:
                raise Incompatible(
                    f'tokenizer_config.json declares {content!r} as id {index}, tokenizer.json '
                    f'gives it {self._full.token_to_id(content)}; take both files from one source.')
        files.declared = [c for c in files.declared if self._full.token_to_id(c) is None]
        for content in dict.fromkeys([*files.named.values(), *files.declared]):
            if content and content not in known:
                self._full.add_special_tokens([tokenizers.AddedToken(content, special=True)])

    def encode(self, text: str, allow_special: bool, at_start: bool) -> list[int]:
        """Encode; without ``allow_special`` no control token comes out, whatever the text."""
        check_text(text)
        if allow_special or not self.control_spans(text):
            return self._encode_full(text, at_start)
        return self._encode_plain(text, at_start)

    def encode_marked(self, text: str, marks: Marks, at_start: bool) -> list[int]:
        """
        Encode the text of a template in which user text that spells control tokens is marked.

        The text is cut at the control tokens that the template wrote, as the tokenizer itself
        does; what lies between is encoded as plain text, marked parts in place.
        """
        start, end = re.escape(marks.start), re.escape(marks.end)
        spelled = _any_of(marks.spelled).pattern
        # A lone mark is left where a template split the text; nothing joins across it.
        pattern = f'{start}({spelled}){end}|[{start}{end}]'
        ids: list[int] = []
        run, strip = '', False

        def close(right: bool) -> None:
            nonlocal run, strip
            run = run.lstrip() if strip else run
            run = run.rstrip() if right else run
            if run:
                ids.extend(self._encode_plain(run, at_start and not ids))
            run, strip = '', False

        for n, part in enumerate(re.split(pattern, text)):
            part, at = part or '', 0
            for match in () if n % 2 else self.control.finditer(part):
                run += part[at:match.start()]
                at = match.end()
                index, token = self._control[match.group()]
                close(token.lstrip)
                ids.append(index)
                strip = token.rstrip
            run += part[at:]
        close(False)
        return ids

    def control_spans(self, text: str, special_only: bool = False) -> list[tuple[int, int]]:
        """Return where ``text`` would be taken for control tokens, as character ranges."""
        pattern = self._special if special_only else self.control
        spans = [match.span() for match in pattern.finditer(text)]
        if not self._hidden:
            return spans
        with self._lock:
            encoding = self._full.encode(text, add_special_tokens=False)
        spans += [span for at, index in enumerate(encoding.ids) if index in self._forbidden
                  and (self._added[index].special or not special_only)
                  and (span := encoding.token_to_chars(at)) is not None]
        merged: list[tuple[int, int]] = []
        for begin, end in sorted(spans):
            if merged and begin < merged[-1][1]:
                merged[-1] = merged[-1][0], max(end, merged[-1][1])
            elif begin < end:
                merged.append((begin, end))
        return merged

    def _encode_full(self, text: str, at_start: bool, plain: bool = False) -> list[int]:
        """
        Encode; ``plain`` takes control tokens for text.

        Text that continues another is put behind a token of its own, so that no word-start mark
        comes before it.
        """
        if not text:
            return []
        with self._lock:
            self._full.encode_special_tokens = plain
            text = text if at_start else _ANCHOR + text
            try:
                if len(text) < _LONG:
                    ids = self._full.encode(text, add_special_tokens=False).ids
                else:
                    ids = self._full.encode_batch_fast([text], add_special_tokens=False)[0].ids
            finally:
                self._full.encode_special_tokens = False
        return ids if at_start else ids[1:]

    def _encode_plain(self, text: str, at_start: bool, again: bool = True) -> list[int]:
        ids = self._encode_full(text, at_start, plain=True)
        if self._forbidden.isdisjoint(ids):
            return ids
        # A model that holds the token as an ordinary piece (Unigram): cut the spelling apart.
        cuts = [match.start() + 1 for match in self.control.finditer(text)]
        if not again or not cuts:
            raise InvalidArgument(
                'The text spells a control token and this tokenizer has no other ids for it; '
                'remove it from the text.')
        ends = [*cuts, len(text)]
        ids = []
        for begin, end in zip([0, *cuts], ends, strict=True):
            if begin < end:
                ids += self._encode_plain(text[begin:end], at_start and begin == 0, False)
        return ids

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its spelling in the vocabulary."""
        return self._full.token_to_id(token)

    def is_special(self, token_id: int) -> bool:
        """Tell whether the id is a special token, one that text leaves out."""
        token = self._added.get(token_id)
        return token is not None and token.special

    def token_bytes(self, token_id: int) -> bytes:
        """Return what an id adds to the bytes of a text; nothing for an id without a token."""
        data = self._bytes.get(token_id)
        if data is None:
            added = self._added.get(token_id)
            if added is not None:
                data = added.content.encode('utf-8', 'replace')
            else:
                token = self._full.id_to_token(token_id) if token_id < self.size else None
                data = b'' if token is None else self._decode(token)
            self._bytes[token_id] = data
        return data


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Match any of some texts, the longest first."""
    longest = sorted(texts, key=len, reverse=True)
    return re.compile('|'.join(map(re.escape, longest))) if longest else NEVER


def _digest(files: TextFiles) -> str:
    """Hash what decides ids and text, whatever the layout of the JSON; templates are apart."""
    body: dict[str, Any] = {
        key: value for key, value in files.tokenizer.items()
        if key not in ('truncation', 'padding', 'version')}
    model = body.get('model')
    if isinstance(model, dict) and isinstance(model.get('merges'), list):
        body['model'] = {**model, 'merges': [
            merge.split(' ', 1) if isinstance(merge, str) else merge for merge in model['merges']]}
    parts = [body, files.named, files.extra, *([files.declared] if files.declared else [])]
    text = json.dumps(parts, sort_keys=True, separators=(',', ':'))
    return hashlib.sha256(text.encode()).hexdigest()
