# cython: language_level=3
"""The hot path in C. Each function handles the common cases, and returns at unusual input.

Row messages: PostgreSQL documentation, "Logical Replication Message Formats"; COPY data: "COPY",
"Text Format" and "Binary Format". Every read is checked against the end of its message, because
a different machine sends the messages. Sizes in bytes.
"""

from cpython.buffer cimport PyBUF_WRITABLE, PyBuffer_FillInfo
from cpython.bytes cimport (
    PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
)
from cpython.dict cimport PyDict_Contains, PyDict_DelItem, PyDict_GetItem, PyDict_SetItem
from cpython.list cimport PyList_Append, PyList_CheckExact, PyList_GET_ITEM, PyList_GET_SIZE
from cpython.mem cimport PyMem_Free, PyMem_Malloc, PyMem_Realloc
from cpython.ref cimport Py_INCREF
from cpython.tuple cimport PyTuple_New, PyTuple_SET_ITEM
from libc.stdint cimport int64_t, uint32_t, uint64_t, uintptr_t
from libc.stdio cimport snprintf
from libc.string cimport memcmp, memcpy, memset

cdef extern from *:
    """
    #ifndef STREAMER_SOURCE_CRC
    #define STREAMER_SOURCE_CRC 0
    #endif
    """
    const uint32_t STREAMER_SOURCE_CRC

SOURCE_CRC = STREAMER_SOURCE_CRC

cdef object BEGUN = object()  # marks a transaction whose BEGIN `gather` has read

cdef enum:
    COLUMNS_MAX = 1664  # PostgreSQL's MaxTupleAttributeNumber
    TUPLE_AT = 6        # after kind, relid and the marker of the tuple

cdef enum:
    INSERT = 0x49       # I
    UPDATE = 0x55       # U
    DELETE = 0x44       # D
    BEGIN = 0x42        # B: int64 final LSN, int64 commit time, int32 xid
    BEGIN_SIZE = 21
    COMMIT = 0x43       # C: int8 flags, int64 commit LSN, int64 end LSN, int64 commit time
    COMMIT_SIZE = 26
    NEW_TUPLE = 0x4E    # N
    KEY_TUPLE = 0x4B    # K
    OLD_TUPLE = 0x4F    # O
    KIND_NULL = 0x6E    # n
    KIND_UNCHANGED = 0x75  # u
    KIND_TEXT = 0x74    # t
    KIND_BINARY = 0x62  # b
    TAB = 9
    NEWLINE = 10
    RETURN = 13
    BACKSLASH = 92


cdef inline uint32_t be32(const unsigned char *p) noexcept nogil:
    return (<uint32_t>p[0] << 24) | (<uint32_t>p[1] << 16) | (<uint32_t>p[2] << 8) | p[3]


cdef inline uint64_t be64(const unsigned char *p) noexcept nogil:
    return (<uint64_t>be32(p) << 32) | be32(p + 4)


cdef struct Field:
    const unsigned char *at  # NULL for an SQL NULL; the int32 length precedes the value
    Py_ssize_t size


cdef class _Tuples:
    """Reads tuples of *count* columns whose values are all of one kind, or NULL."""

    cdef int count
    cdef bint binary
    cdef unsigned char kind
    cdef Field *fields

    def __cinit__(self, int count, *args, bint binary, **keywords):
        if not 0 <= count <= COLUMNS_MAX:
            raise ValueError("too many columns")
        self.count = count
        self.binary = binary
        self.kind = KIND_BINARY if binary else KIND_TEXT
        self.fields = <Field *>PyMem_Malloc((count + 1) * sizeof(Field))
        if self.fields == NULL:
            raise MemoryError

    def __dealloc__(self):
        PyMem_Free(self.fields)

    cdef bint read(self, const unsigned char *p, Py_ssize_t size) noexcept nogil:
        """Find the values of the only tuple of a row message; False for anything unusual."""
        return self.read_at(p, size, TUPLE_AT, self.fields, NULL) == size

    cdef Py_ssize_t read_at(
        self, const unsigned char *p, Py_ssize_t size, Py_ssize_t position, Field *fields,
        const Field *old
    ) noexcept nogil:
        """Find the values of the tuple at *position*; return the tuple's end, 0 for anything
        unusual.

        *old*: the values of the old row, which replace unchanged values; NULL without an old row.
        """
        cdef Py_ssize_t length
        cdef int n
        if size - position < 2 or ((p[position] << 8) | p[position + 1]) != self.count:
            return 0
        position += 2
        for n in range(self.count):
            if position >= size:
                return 0
            if p[position] == self.kind:
                if size - position < 5:
                    return 0
                length = be32(p + position + 1)
                position += 5
                if length > size - position:
                    return 0
                fields[n].at = p + position
                fields[n].size = length
                position += length
            elif p[position] == KIND_NULL:
                fields[n].at = NULL
                position += 1
            elif p[position] == KIND_UNCHANGED and old != NULL and old[n].at != NULL:
                fields[n] = old[n]
                position += 1
            else:
                return 0
        return position


cdef int *_positions(tuple positions, int count) except NULL:
    cdef Py_ssize_t n
    cdef int *made = <int *>PyMem_Malloc((len(positions) + 1) * sizeof(int))
    if made == NULL:
        raise MemoryError
    for n in range(len(positions)):
        if not 0 <= positions[n] < count:
            PyMem_Free(made)
            raise ValueError("a position outside the row")
        made[n] = positions[n]
    return made


cdef Py_ssize_t _end_of_tuple(
    const unsigned char *p, Py_ssize_t size, Py_ssize_t position, int count
) noexcept nogil:
    """Return the end of the tuple whose marker is at *position*; 0 unless the tuple is
    complete and has *count* columns.
    """
    cdef int n
    if size - position < 3 or ((p[position + 1] << 8) | p[position + 2]) != count:
        return 0
    position += 3
    for n in range(count):
        if position >= size:
            return 0
        if p[position] == KIND_TEXT or p[position] == KIND_BINARY:
            if size - position < 5:
                return 0
            position += 5 + <Py_ssize_t>be32(p + position + 1)
        else:
            position += 1
    return position if position <= size else 0


def extend(
    list payloads not None, int count, int added, bytes on_insert not None,
    bytes on_update not None
):
    """Return row messages with *added* more columns in each tuple of *count* columns.

    New tuples get the encoded values *on_insert* or *on_update*, old tuples get NULLs. Messages of
    different kinds, and malformed messages, stay unchanged. Return None if a message is not bytes.
    See `streamer.apply.rows.row_metadata`.
    """
    cdef Py_ssize_t size, position, end, more, tail_size
    cdef const unsigned char *p
    cdef const char *tail
    cdef char *out
    cdef list found = []
    cdef object payload
    cdef bytes made, values
    cdef int width = count + added
    for payload in payloads:
        if not PyBytes_CheckExact(payload):
            return None
        p = <const unsigned char *>PyBytes_AS_STRING(payload)
        size = PyBytes_GET_SIZE(payload)
        if size < TUPLE_AT or not (p[0] == INSERT or p[0] == UPDATE or p[0] == DELETE):
            PyList_Append(found, payload)
            continue
        values = on_insert if p[0] == INSERT else on_update
        tail = PyBytes_AS_STRING(values)
        tail_size = PyBytes_GET_SIZE(values)
        more = 0
        position = TUPLE_AT - 1
        while position < size:
            end = _end_of_tuple(p, size, position, count)
            if end == 0:
                break
            more += tail_size if p[position] == NEW_TUPLE else added
            position = end
        if position != size:
            PyList_Append(found, payload)
            continue
        made = PyBytes_FromStringAndSize(NULL, size + more)
        out = PyBytes_AS_STRING(made)
        memcpy(out, p, TUPLE_AT - 1)
        out += TUPLE_AT - 1
        position = TUPLE_AT - 1
        while position < size:
            end = _end_of_tuple(p, size, position, count)
            memcpy(out, p + position, end - position)
            out[1] = <char>(width >> 8)
            out[2] = <char>(width & 0xFF)
            out += end - position
            if p[position] == NEW_TUPLE:
                memcpy(out, tail, tail_size)
                out += tail_size
            else:
                memset(out, KIND_NULL, added)
                out += added
            position = end
        PyList_Append(found, made)
    return found


def mark_deletes(
    list payloads not None, bytes keys not None, int added, bytes values not None
):
    """Return row messages with each delete as an update, extended by *added* columns.

    *keys* contains a byte for each column of the source; the byte is not 0 for a column of the key.
    The new tuple contains the columns of the key, or of a whole old row, and the encoded *values*.
    All further columns are unchanged. All messages are bytes. See
    `streamer.apply.rows.row_metadata`.
    """
    cdef Py_ssize_t size, position, begin, tail_size = PyBytes_GET_SIZE(values), used
    cdef int count = <int>PyBytes_GET_SIZE(keys), n, width
    cdef const unsigned char *p
    cdef const unsigned char *flags = <const unsigned char *>PyBytes_AS_STRING(keys)
    cdef char *out
    cdef char *start
    cdef bint is_whole
    cdef list found = []
    cdef object payload
    cdef bytes made
    width = count + added
    for payload in payloads:
        p = <const unsigned char *>PyBytes_AS_STRING(payload)
        size = PyBytes_GET_SIZE(payload)
        if (
            size < TUPLE_AT or p[0] != DELETE
            or _end_of_tuple(p, size, TUPLE_AT - 1, count) != size
        ):
            PyList_Append(found, payload)
            continue
        is_whole = p[TUPLE_AT - 1] != KEY_TUPLE
        # At most both tuples in full, and the added bytes of each tuple.
        made = PyBytes_FromStringAndSize(NULL, 2 * size + added + tail_size)
        start = out = PyBytes_AS_STRING(made)
        memcpy(out, p, TUPLE_AT - 1)
        out[0] = UPDATE
        out += TUPLE_AT - 1
        if is_whole:
            memcpy(out, p + TUPLE_AT - 1, size - TUPLE_AT + 1)
            out[1] = <char>(width >> 8)
            out[2] = <char>(width & 0xFF)
            out += size - TUPLE_AT + 1
            memset(out, KIND_NULL, added)
            out += added
        out[0] = NEW_TUPLE
        out[1] = <char>(width >> 8)
        out[2] = <char>(width & 0xFF)
        out += 3
        position = TUPLE_AT + 2
        for n in range(count):
            begin = position
            position += 1
            if p[begin] == KIND_TEXT or p[begin] == KIND_BINARY:
                position += 4 + <Py_ssize_t>be32(p + begin + 1)
            if is_whole or flags[n]:
                memcpy(out, p + begin, position - begin)
                out += position - begin
            else:
                out[0] = KIND_UNCHANGED
                out += 1
        memcpy(out, PyBytes_AS_STRING(values), tail_size)
        out += tail_size
        used = out - start
        PyList_Append(found, made[:used])
    return found


cdef class RowFolder(_Tuples):
    """Folds row messages into dicts of net changes, see `streamer.apply.rows.fold.Fold`."""

    cdef int *keys
    cdef int key_count, added
    cdef bint is_append, is_full, takes_updates
    cdef Field *new_fields

    def __cinit__(
        self, int count, tuple key_positions, *, bint binary, bint is_append, bint is_full,
        bint takes_updates, int added=0
    ):
        """*is_full*: updates and deletes come with the old row. *added*: the number of columns, at
        the end, that the source does not send.
        """
        if not 0 <= added <= count:
            raise ValueError("more added columns than columns")
        self.keys = _positions(key_positions, count)
        self.key_count = len(key_positions)
        self.added = added
        self.is_append = is_append
        self.is_full = is_full
        self.takes_updates = takes_updates
        self.new_fields = <Field *>PyMem_Malloc((count + 1) * sizeof(Field))
        if self.new_fields == NULL:
            raise MemoryError

    def __dealloc__(self):
        PyMem_Free(self.keys)
        PyMem_Free(self.new_fields)

    cdef Py_ssize_t read_old(self, const unsigned char *p, Py_ssize_t size) noexcept nogil:
        """Find the old and new values of an update with the same key in both, or the old values of
        a delete; return the end of the old tuple, 0 for anything unusual.
        """
        cdef Py_ssize_t end
        cdef Field *old
        cdef Field *new
        cdef int n
        if p[5] != OLD_TUPLE or not self.takes_updates:
            return 0
        end = self.read_at(p, size, TUPLE_AT, self.fields, NULL)
        if p[0] == DELETE:
            return end if end == size else 0
        if p[0] != UPDATE or end == 0 or end >= size or p[end] != NEW_TUPLE:
            return 0
        if self.read_at(p, size, end + 1, self.new_fields, self.fields) != size:
            return 0
        for n in range(self.key_count):
            old = &self.fields[self.keys[n]]
            new = &self.new_fields[self.keys[n]]
            if old.at == NULL or new.at == NULL or old.size != new.size:
                return 0
            if memcmp(old.at, new.at, old.size) != 0:
                return 0
        return end

    cdef bint is_pending(self, object pending, const unsigned char *p, Py_ssize_t end):
        """Whether the old tuple of a message, up to *end*, repeats the source's values of *pending*.

        Streamer adds a NULL of one byte to an old row for each column that the source does not send.
        """
        cdef Py_ssize_t stop = end - self.added
        return (
            PyBytes_CheckExact(pending)
            and PyBytes_GET_SIZE(pending) >= stop
            and memcmp(PyBytes_AS_STRING(pending) + TUPLE_AT, p + TUPLE_AT, stop - TUPLE_AT) == 0
        )

    cdef object new_row(self, const unsigned char *p):
        """Return the new row of an update as a message with a single tuple."""
        cdef Py_ssize_t size = TUPLE_AT + 2
        cdef int n
        cdef Field *field
        cdef char *out
        for n in range(self.count):
            field = &self.new_fields[n]
            size += 1 if field.at == NULL else 5 + field.size
        made = PyBytes_FromStringAndSize(NULL, size)
        out = PyBytes_AS_STRING(made)
        memcpy(out, p, TUPLE_AT + 2)
        out[5] = NEW_TUPLE
        out += TUPLE_AT + 2
        for n in range(self.count):
            field = &self.new_fields[n]
            if field.at == NULL:
                out[0] = KIND_NULL
                out += 1
            else:
                memcpy(out, field.at - 5, field.size + 5)
                out += field.size + 5
        return made

    cdef object value(self, Field *field):
        if self.binary:
            return PyBytes_FromStringAndSize(<const char *>field.at - 4, field.size + 4)
        return PyBytes_FromStringAndSize(<const char *>field.at, field.size)

    cdef object key(self):
        """Return the key of the tuple just read; None if a column of the key is NULL."""
        cdef int n
        cdef object value
        for n in range(self.key_count):
            if self.fields[self.keys[n]].at == NULL:
                return None
        if self.key_count == 1:
            return self.value(&self.fields[self.keys[0]])
        key = PyTuple_New(self.key_count)
        for n in range(self.key_count):
            value = self.value(&self.fields[self.keys[n]])
            Py_INCREF(value)
            PyTuple_SET_ITEM(key, n, value)
        return key

    def fold(
        self, list payloads not None, Py_ssize_t start, dict inserts not None,
        dict updates not None, dict deletes not None, dict moves not None, list counts not None
    ):
        """Fold messages from number *start* on; return the number of the first message that is not
        folded.

        Rows in *inserts* and *updates* are whole messages. The method adds the numbers of folded
        inserts, updates and deletes to *counts*.
        """
        cdef Py_ssize_t n = start, stop = PyList_GET_SIZE(payloads), size
        cdef const unsigned char *p
        cdef object payload, key, row
        cdef Py_ssize_t inserted = 0, updated = 0, deleted = 0, old_end
        cdef bint has_moves = len(moves) > 0
        cdef void *pending
        while n < stop:
            payload = row = <object>PyList_GET_ITEM(payloads, n)
            if not PyBytes_CheckExact(payload):
                break
            p = <const unsigned char *>PyBytes_AS_STRING(payload)
            size = PyBytes_GET_SIZE(payload)
            if size < TUPLE_AT:
                break
            old_end = 0
            if self.is_full and p[0] != INSERT:
                old_end = self.read_old(p, size)
                if old_end == 0:
                    break
            elif not self.read(p, size):
                break
            if not self.key_count:
                # Without a key no two inserts are about the same row.
                if p[0] != INSERT or p[5] != NEW_TUPLE:
                    break
                PyDict_SetItem(inserts, len(inserts), payload)
                inserted += 1
                n += 1
                continue
            key = self.key()
            if key is None or (has_moves and PyDict_Contains(moves, key)):
                break
            if old_end:
                pending = <void *>PyDict_GetItem(inserts, key)
                if pending == NULL:
                    pending = <void *>PyDict_GetItem(updates, key)
                if pending != NULL and not self.is_pending(<object>pending, p, old_end):
                    break
                if p[0] == UPDATE:
                    row = self.new_row(p)
            if p[0] == INSERT and p[5] == NEW_TUPLE:
                if PyDict_Contains(updates, key) or PyDict_Contains(inserts, key):
                    break
                PyDict_SetItem(inserts, key, row)
                inserted += 1
            elif p[0] == UPDATE and self.takes_updates and (old_end or p[5] == NEW_TUPLE):
                if PyDict_Contains(inserts, key):
                    PyDict_SetItem(inserts, key, row)
                elif PyDict_Contains(updates, key):
                    PyDict_SetItem(updates, key, row)
                elif PyDict_Contains(deletes, key):
                    break
                else:
                    PyDict_SetItem(updates, key, row)
                updated += 1
            elif p[0] == DELETE and self.takes_updates and (old_end or p[5] == KEY_TUPLE):
                if not self.is_append:
                    if PyDict_Contains(inserts, key):
                        PyDict_DelItem(inserts, key)
                    elif PyDict_Contains(deletes, key):
                        break
                    else:
                        if PyDict_Contains(updates, key):
                            PyDict_DelItem(updates, key)
                        PyDict_SetItem(deletes, key, None)
                deleted += 1
            else:
                break
            n += 1
        counts[0] += inserted
        counts[1] += updated
        counts[2] += deleted
        return n


    def chain(
        self, list payloads not None, Py_ssize_t start, list times not None, list stops not None,
        Py_ssize_t transaction, Py_ssize_t number, dict chains not None, list counts not None
    ):
        """Append messages from number *start* on to the chains of their keys; return the number of
        the first message that is not appended.

        A chain contains the commit time, the kind, the number and the message of each change, see
        `streamer.apply.rows.history_chains`. *number*: the number of the first change. *times*: the
        commit times of transactions. *stops*: for each transaction, the position after its last
        message. *transaction*: the index of the first message's transaction in these lists.
        *counts*: as for `fold`.
        """
        cdef Py_ssize_t n = start, stop = PyList_GET_SIZE(payloads), size, end = start
        cdef const unsigned char *p
        cdef object payload, key, commit_time = None
        cdef list found
        cdef void *known
        cdef Py_ssize_t inserted = 0, updated = 0, deleted = 0
        cdef bint was_deleted
        while n < stop and self.key_count:
            while n >= end:
                end = stops[transaction]
                commit_time = times[transaction]
                transaction += 1
            payload = <object>PyList_GET_ITEM(payloads, n)
            if not PyBytes_CheckExact(payload):
                break
            p = <const unsigned char *>PyBytes_AS_STRING(payload)
            size = PyBytes_GET_SIZE(payload)
            if size < TUPLE_AT or not self.read(p, size):
                break
            key = self.key()
            if key is None or self.is_full or not self.takes_updates:
                break
            if not (
                (p[5] == NEW_TUPLE and (p[0] == INSERT or p[0] == UPDATE))
                or (p[5] == KEY_TUPLE and p[0] == DELETE)
            ):
                break
            known = <void *>PyDict_GetItem(chains, key)
            if known == NULL:
                PyDict_SetItem(chains, key, [commit_time, <int>p[0], number + n - start, payload])
            else:
                found = <list>known
                was_deleted = found[PyList_GET_SIZE(found) - 3] == DELETE
                if was_deleted != (p[0] == INSERT):
                    break
                found.append(commit_time)
                found.append(<int>p[0])
                found.append(number + n - start)
                found.append(payload)
            if p[0] == INSERT:
                inserted += 1
            elif p[0] == UPDATE:
                updated += 1
            else:
                deleted += 1
            n += 1
        counts[0] += inserted
        counts[1] += updated
        counts[2] += deleted
        return n


cdef class _Buffer:
    """A growing buffer of bytes."""

    cdef unsigned char *data
    cdef Py_ssize_t used, room

    def __dealloc__(self):
        PyMem_Free(self.data)

    cdef unsigned char *reserve(self, Py_ssize_t size) except NULL:
        """Make room for *size* bytes; return their address."""
        cdef unsigned char *grown
        cdef Py_ssize_t room = self.room or 65536
        if self.room - self.used < size or self.data == NULL:
            while room - self.used < size:
                room *= 2
            grown = <unsigned char *>PyMem_Realloc(self.data, room)
            if grown == NULL:
                raise MemoryError
            self.data = grown
            self.room = room
        return self.data + self.used


cdef Py_ssize_t write_text(
    unsigned char *out, const unsigned char *value, Py_ssize_t size
) noexcept nogil:
    """Write a value in COPY's text format; return the number of bytes, at most twice *size*."""
    cdef Py_ssize_t n, used = 0
    cdef unsigned char special = 0, byte
    for n in range(size):
        byte = value[n]
        out[n] = byte
        special |= (byte == BACKSLASH) | (byte <= RETURN)
    if not special:
        return size
    for n in range(size):
        byte = value[n]
        if byte == BACKSLASH or byte == TAB or byte == NEWLINE or byte == RETURN:
            out[used] = BACKSLASH
            used += 1
            if byte == TAB:
                byte = 0x74
            elif byte == NEWLINE:
                byte = 0x6E
            elif byte == RETURN:
                byte = 0x72
        out[used] = byte
        used += 1
    return used


cdef class RowEncoder(_Tuples):
    """Writes rows as COPY data, in the order of *positions*, each after *head*.

    *head*: COPY data at the beginning of each row. In text, this is the leading columns, each with
    a tab; in binary, the number of columns and the leading columns. A row is a message with a
    single tuple, or a sequence of items.
    """

    cdef int *positions
    cdef int width
    cdef object null

    def __cinit__(self, int count, tuple positions, *, bint binary, object null):
        self.positions = _positions(positions, count)
        self.width = len(positions)
        self.null = null

    def __dealloc__(self):
        PyMem_Free(self.positions)

    def encode(self, bytes head not None, list rows not None, list leads=None):
        """Return *rows* as COPY data. Raises TypeError for an item that is neither bytes nor NULL,
        ValueError for a message that cannot be read.

        *leads*: for each row, COPY data of the columns between head and values.
        """
        cdef _Buffer buffer = _Buffer()
        cdef Py_ssize_t n, size
        cdef Py_ssize_t head_size = PyBytes_GET_SIZE(head)
        cdef unsigned char *out
        cdef object row
        cdef bytes lead
        if leads is not None and PyList_GET_SIZE(leads) != PyList_GET_SIZE(rows):
            raise ValueError("a lead for each row")
        for n in range(PyList_GET_SIZE(rows)):
            row = <object>PyList_GET_ITEM(rows, n)
            out = buffer.reserve(head_size)
            memcpy(out, PyBytes_AS_STRING(head), head_size)
            buffer.used += head_size
            if leads is not None:
                lead = leads[n]
                size = len(lead)
                out = buffer.reserve(size)
                memcpy(out, PyBytes_AS_STRING(lead), size)
                buffer.used += size
            if PyBytes_CheckExact(row):
                self.write_message(buffer, row)
            else:
                self.write_items(buffer, row)
            if not self.binary:
                buffer.reserve(1)[0] = NEWLINE
                buffer.used += 1
        return PyBytes_FromStringAndSize(<const char *>buffer.data, buffer.used)

    cdef int write_message(self, _Buffer buffer, object row) except -1:
        cdef Py_ssize_t size = PyBytes_GET_SIZE(row)
        cdef unsigned char *start
        cdef unsigned char *out
        cdef Field *field
        cdef int n
        if not self.read(<const unsigned char *>PyBytes_AS_STRING(row), size):
            raise ValueError("malformed row message")
        # *positions* may repeat a column, so `size_max` adds the size of the value at each position.
        start = out = buffer.reserve(self.size_max())
        for n in range(self.width):
            field = &self.fields[self.positions[n]]
            if self.binary:
                if field.at == NULL:
                    out[0] = out[1] = out[2] = out[3] = 0xFF
                    out += 4
                else:
                    memcpy(out, field.at - 4, field.size + 4)
                    out += field.size + 4
            else:
                if n:
                    out[0] = TAB
                    out += 1
                if field.at == NULL:
                    out[0] = BACKSLASH
                    out[1] = 0x4E
                    out += 2
                else:
                    out += write_text(out, field.at, field.size)
        buffer.used += out - start
        return 0

    cdef Py_ssize_t size_max(self) noexcept:
        cdef Py_ssize_t needed = 0
        cdef int n
        for n in range(self.width):
            if self.fields[self.positions[n]].at != NULL:
                needed += self.fields[self.positions[n]].size
        return 2 * needed + 5 * self.width

    cdef int write_items(self, _Buffer buffer, object row) except -1:
        cdef int n, position
        cdef object item
        cdef Py_ssize_t size
        cdef unsigned char *out
        if len(row) != self.count:
            raise ValueError("a row of another width")
        for n in range(self.width):
            item = row[self.positions[n]]
            if item is self.null:
                out = buffer.reserve(5)
                if self.binary:
                    out[0] = out[1] = out[2] = out[3] = 0xFF
                    buffer.used += 4
                    continue
                if n:
                    out[0] = TAB
                    out += 1
                    buffer.used += 1
                out[0] = BACKSLASH
                out[1] = 0x4E
                buffer.used += 2
                continue
            if not PyBytes_CheckExact(item):
                raise TypeError("not a plain value")
            size = PyBytes_GET_SIZE(item)
            out = buffer.reserve(2 * size + 1)
            if self.binary:
                memcpy(out, PyBytes_AS_STRING(item), size)
                buffer.used += size
                continue
            if n:
                out[0] = TAB
                out += 1
                buffer.used += 1
            buffer.used += write_text(
                out, <const unsigned char *>PyBytes_AS_STRING(item), size
            )
        return 0


# ---- versions of a history table ---------------------------------------------------------------

cdef enum:
    NUMBER_MAX = 24     # bytes of an int64 as COPY data, at most


cdef Py_ssize_t write_number(
    unsigned char *out, int64_t value, int size, bint binary
) noexcept nogil:
    """Write an integer of *size* bytes as COPY data, with the tab that follows; return the length."""
    cdef int n
    if not binary:
        return snprintf(<char *>out, NUMBER_MAX, "%lld\t", <long long>value)
    out[0] = out[1] = out[2] = 0
    out[3] = size
    for n in range(size):
        out[3 + size - n] = value & 0xFF
        value >>= 8
    return 4 + size


def lead_chains(
    list chains not None, Py_ssize_t start, Py_ssize_t stop, dict heads not None, object times, *,
    bint binary
):
    """Return the leads of the staged rows for chains from number *start* to before *stop*.

    See `streamer.apply.sql.history_versions.VersionStatements.stage`.
    """
    cdef _Buffer buffer = _Buffer()
    cdef list leads = [], chain
    cdef tuple pair, both
    cdef bytes head
    cdef Py_ssize_t n, m
    cdef bint matters
    for n in range(start, stop):
        pair = chains[n]
        chain = pair[1]
        matters = chain[1] == INSERT
        for m in range(5, len(chain), 4):
            matters = matters or chain[m] == INSERT
        both = heads[chain[1]]
        head = both[1 if matters else 0]
        buffer.used = 0
        buffer.used = write_number(buffer.reserve(NUMBER_MAX), n, 4, binary)
        append(buffer, head)
        if binary:
            buffer.used += write_number(buffer.reserve(NUMBER_MAX), chain[0], 8, binary)
        else:
            append(buffer, times[chain[0]])
        if PyBytes_CheckExact(pair[0]):
            append_value(buffer, pair[0], binary)
        else:
            for m, item in enumerate(pair[0]):
                if m and not binary:
                    append(buffer, b"\t")
                append_value(buffer, item, binary)
        leads.append(PyBytes_FromStringAndSize(<const char *>buffer.data, buffer.used))
    return leads


cdef int append(_Buffer buffer, bytes data) except -1:
    cdef Py_ssize_t size = len(data)
    memcpy(buffer.reserve(size), PyBytes_AS_STRING(data), size)
    buffer.used += size
    return 0


cdef int append_value(_Buffer buffer, object item, bint binary) except -1:
    """Append an item of a row as COPY data."""
    if not PyBytes_CheckExact(item):
        return append(buffer, bytes(item))  # NULL
    if binary:
        return append(buffer, item)
    cdef Py_ssize_t size = PyBytes_GET_SIZE(item)
    buffer.used += write_text(
        buffer.reserve(2 * size), <const unsigned char *>PyBytes_AS_STRING(item), size
    )
    return 0


cdef object version_lead(
    object number, int64_t since, int64_t until, bytes ended, object times, bint binary
):
    cdef unsigned char lead[41]
    if not binary:
        return b"%d\t" % number + times[since] + times[until] + ended
    write_number(lead, number, 8, True)
    write_number(lead + 12, since, 8, True)
    write_number(lead + 24, until, 8, True)
    memcpy(lead + 36, PyBytes_AS_STRING(ended), 5)
    return PyBytes_FromStringAndSize(<const char *>lead, 41)


def lead_versions(
    list chains not None, Py_ssize_t start, Py_ssize_t stop, dict ends not None, object numbers,
    object times, tuple ended not None, int64_t begin_time, int64_t open_time, *, bint binary
):
    """Return the leads and rows of the versions that begin with chains from number *start* to before
    *stop*, as `streamer.apply.rows.history_chains.new_versions` finds them.
    """
    cdef list leads = [], rows = [], chain
    cdef Py_ssize_t n, m
    cdef int64_t since, until, time, last_end
    cdef int kind
    cdef bint has_ended, is_deleted
    cdef object row, number, end
    cdef bytes still = ended[0], gone = ended[1]
    if binary and (len(still) != 5 or len(gone) != 5):
        raise ValueError("a boolean has one byte")
    for n in range(start, stop):
        chain = (<tuple?>chains[n])[1]
        end = ends.get(n)
        has_ended = end is not None
        last_end = end if has_ended else begin_time
        since, kind, number = chain[0], chain[1], chain[2]
        if kind == INSERT:
            since = max(since, last_end) if has_ended else begin_time
        until = since
        row = None if kind == DELETE else chain[3]
        for m in range(4, len(chain), 4):
            time, kind = chain[m], chain[m + 1]
            until = max(until, time)
            if kind == INSERT and has_ended:
                until = max(until, last_end)
            is_deleted = kind == DELETE
            if row is not None:
                leads.append(version_lead(
                    numbers[number], since, until, gone if is_deleted else still, times, binary
                ))
                rows.append(row)
            since, number = until, chain[m + 2]
            row = None if is_deleted else chain[m + 3]
        if row is not None:
            leads.append(version_lead(numbers[number], since, open_time, still, times, binary))
            rows.append(row)
    return leads, rows


# ---- transactions ------------------------------------------------------------------------------

def gather(
    list payloads not None, Py_ssize_t start, object block not None, dict touched not None,
    dict opened not None, object begun, *, bint is_foreign, bint takes_commit
):
    """Add the transactions of ordinary messages, from message number *start* on, to *block*.

    The arguments are the state of `streamer.decode.transactions.TransactionAssembler`. *begun*: xid,
    final LSN and commit time of the present transaction; None outside of a transaction. Without
    *takes_commit*, stop at the first COMMIT. Return the number of the first remaining message, and
    *begun* at that message: the identical object if the present transaction is still the same.
    """
    cdef list xids = block.xids, final_lsns = block.final_lsns
    cdef list commit_times = block.commit_times, end_lsns = block.end_lsns
    cdef Py_ssize_t n = start, stop = PyList_GET_SIZE(payloads), size
    cdef const unsigned char *p
    cdef uint64_t final_lsn = 0, end_lsn, last_end_lsn = 0
    cdef uint32_t relid, last_relid = 0
    cdef bint is_open = begun is not None, has_sink = False
    cdef object payload, changes, key = None, xid = None, lsn = None, commit_time = None
    cdef object sink = None
    cdef void *found
    if is_open:
        xid, lsn, commit_time = begun
        final_lsn = lsn
    if PyList_GET_SIZE(end_lsns):
        last_end_lsn = end_lsns[PyList_GET_SIZE(end_lsns) - 1]
    while n < stop:
        payload = <object>PyList_GET_ITEM(payloads, n)
        if not PyBytes_CheckExact(payload):
            break
        size = PyBytes_GET_SIZE(payload)
        if size < 1:
            break
        p = <const unsigned char *>PyBytes_AS_STRING(payload)
        if p[0] == INSERT or p[0] == UPDATE or p[0] == DELETE:
            if not is_open or size < TUPLE_AT:
                break
            relid = be32(p + 1)
            if not has_sink or relid != last_relid:
                if key is None or relid != last_relid:
                    key = PyBytes_FromStringAndSize(<const char *>p + 1, 4)
                    last_relid = relid
                found = <void *>PyDict_GetItem(touched, key)
                if found == NULL:
                    if is_foreign:
                        break
                    found = <void *>PyDict_GetItem(opened, key)
                    if found == NULL:
                        break
                    PyDict_SetItem(touched, key, <object>found)
                sink = (<object>found).payloads
                has_sink = True
            if PyList_CheckExact(sink):  # otherwise the caller ignores the changes
                PyList_Append(sink, payload)
        elif p[0] == COMMIT:
            if not is_open or not takes_commit or size != COMMIT_SIZE or p[1] != 0:
                break
            end_lsn = be64(p + 10)
            if be64(p + 2) != final_lsn or final_lsn < last_end_lsn or end_lsn <= final_lsn:
                break
            number = PyList_GET_SIZE(xids)
            for changes in touched.values():
                sink = changes.payloads
                if PyList_CheckExact(sink):
                    PyList_Append(changes.numbers, number)
                    PyList_Append(changes.stops, PyList_GET_SIZE(sink))
            touched.clear()
            PyList_Append(xids, xid)
            PyList_Append(final_lsns, lsn)
            PyList_Append(commit_times, commit_time)
            PyList_Append(end_lsns, end_lsn)
            last_end_lsn = end_lsn
            begun = None
            is_open = has_sink = False
        elif p[0] == BEGIN:
            if is_open or size != BEGIN_SIZE:
                break
            final_lsn = be64(p + 1)
            xid, lsn, commit_time = be32(p + 17), final_lsn, <int64_t>be64(p + 9)
            begun = BEGUN
            is_open = True
            is_foreign = has_sink = False
        else:
            break
        n += 1
    if begun is BEGUN:
        begun = xid, lsn, commit_time
    return n, begun


# ---- frames ------------------------------------------------------------------------------------

ctypedef int (*get_copy_data_t)(void *connection, char **buffer, int is_async) noexcept nogil
ctypedef void (*free_memory_t)(void *memory) noexcept nogil

cdef enum:
    XLOG_DATA = 0x77    # w
    HEADER_SIZE = 25    # kind, start, end and time
    KEEPALIVE = 0x6B    # k
    KEEPALIVE_SIZE = 18 # kind, end of WAL, time and whether a reply is requested


cdef class Frame:
    """A frame in libpq's memory, freed with this object. Supports the buffer protocol."""

    cdef char *data
    cdef Py_ssize_t size
    cdef free_memory_t free_memory

    def __dealloc__(self):
        if self.data != NULL:
            self.free_memory(self.data)

    def __getbuffer__(self, Py_buffer *view, int flags):
        PyBuffer_FillInfo(view, self, self.data, self.size, 1, flags)

    def __releasebuffer__(self, Py_buffer *view):
        pass


cdef class FrameReader:
    """Takes frames of a replication stream out of libpq.

    *connection*: the address of a PGconn; *get_copy_data* and *free_memory*: the addresses of
    PQgetCopyData and PQfreemem in the library that created the PGconn.
    """

    cdef void *connection
    cdef get_copy_data_t get_copy_data
    cdef free_memory_t free_memory
    cdef readonly object last_lsn
    cdef readonly Py_ssize_t taken_bytes
    cdef uint64_t wal_end
    cdef bint has_keepalive
    cdef bint requests_reply

    def __cinit__(
        self, uintptr_t connection, uintptr_t get_copy_data, uintptr_t free_memory
    ):
        if not connection or not get_copy_data or not free_memory:
            raise ValueError("a null address")
        self.connection = <void *>connection
        self.get_copy_data = <get_copy_data_t>get_copy_data
        self.free_memory = <free_memory_t>free_memory
        self.last_lsn = 0

    def take_keepalive(self):
        """Return the end of WAL in the last keepalive, and whether a keepalive has requested a reply.

        Returns None without a keepalive since the last call.
        """
        if not self.has_keepalive:
            return None
        keepalive = (self.wal_end, bool(self.requests_reply))
        self.has_keepalive = self.requests_reply = False
        return keepalive

    def read(
        self, list payloads not None, Py_ssize_t frames_max, Py_ssize_t bytes_max,
        Py_ssize_t large_bytes
    ):
        """Append the payloads of XLogData frames to *payloads*, at most *frames_max* of them.

        Return None at *frames_max* or *bytes_max*. Otherwise return what ended the reading: a
        `Frame` that is large, or neither XLogData nor a keepalive; or a result of PQgetCopyData.
        The result is 0 if the caller must first read from the socket, and negative at the end of
        the stream or after a failure. `taken_bytes` contains the size of all frames taken.
        """
        cdef char *data
        cdef const unsigned char *p
        cdef int size
        cdef Py_ssize_t remaining = bytes_max
        cdef uint64_t lsn = 0
        cdef bint has_lsn = False
        cdef Frame frame
        cdef object payload
        self.taken_bytes = 0
        try:
            while frames_max > 0 and remaining > 0:
                data = NULL
                size = self.get_copy_data(self.connection, &data, 1)
                if size <= 0:
                    return size
                remaining -= size
                p = <const unsigned char *>data
                if size <= large_bytes and size >= HEADER_SIZE and p[0] == XLOG_DATA:
                    lsn = be64(p + 1)
                    has_lsn = True
                    try:
                        payload = PyBytes_FromStringAndSize(
                            data + HEADER_SIZE, size - HEADER_SIZE
                        )
                    finally:
                        self.free_memory(data)
                    payloads.append(payload)
                    frames_max -= 1
                    continue
                if size == KEEPALIVE_SIZE and p[0] == KEEPALIVE:
                    self.wal_end = be64(p + 1)
                    self.requests_reply |= p[KEEPALIVE_SIZE - 1] == 1
                    self.has_keepalive = True
                    self.free_memory(data)
                    continue
                frame = Frame.__new__(Frame)
                frame.data = data
                frame.size = size
                frame.free_memory = self.free_memory
                return frame
            return None
        finally:
            self.taken_bytes = bytes_max - remaining
            if has_lsn:
                self.last_lsn = lsn


# ---- rows of copies ----------------------------------------------------------------------------

ctypedef int (*put_copy_data_t)(void *connection, const char *data, int size) noexcept nogil
ctypedef int (*consume_input_t)(void *connection) noexcept nogil

cdef enum:
    TARGET_FAILED = -3


cdef class RowPump:
    """Passes rows of a COPY from one connection to another, without the interpreter's lock.

    *source* and *target*: the addresses of PGconn objects in nonblocking mode. The remaining
    arguments: addresses of functions in the library that created both.
    """

    cdef void *source
    cdef void *target
    cdef get_copy_data_t get_copy_data
    cdef free_memory_t free_memory
    cdef put_copy_data_t put_copy_data
    cdef consume_input_t consume_input
    cdef readonly int64_t rows
    cdef readonly int64_t size

    def __cinit__(
        self, uintptr_t source, uintptr_t target, uintptr_t get_copy_data, uintptr_t free_memory,
        uintptr_t put_copy_data, uintptr_t consume_input
    ):
        if not (source and target and get_copy_data and free_memory and put_copy_data
                and consume_input):
            raise ValueError("a null address")
        self.source = <void *>source
        self.target = <void *>target
        self.get_copy_data = <get_copy_data_t>get_copy_data
        self.free_memory = <free_memory_t>free_memory
        self.put_copy_data = <put_copy_data_t>put_copy_data
        self.consume_input = <consume_input_t>consume_input
        self.rows = self.size = 0

    def pass_rows(self, Py_ssize_t rows_max, Py_ssize_t bytes_max):
        """Pass rows on until a limit is reached or the source has sent no more.

        Returns 1 at the limit, 0 to wait for the source, -1 at the end of the rows, -2 or -3 after
        a failure of the source or the target.
        """
        cdef int result
        with nogil:
            result = self.pump(rows_max, bytes_max)
        return result

    cdef int pump(self, Py_ssize_t rows_max, Py_ssize_t bytes_max) noexcept nogil:
        cdef char *data
        cdef int size, status
        cdef bint has_read = False
        while rows_max > 0 and bytes_max > 0:
            data = NULL
            size = self.get_copy_data(self.source, &data, 1)
            if size < 0:
                return size
            if size == 0:
                # A connection that fails here fails again when the caller reads from the socket.
                if has_read or not self.consume_input(self.source):
                    return 0
                has_read = True
                continue
            has_read = False
            status = self.put_copy_data(self.target, data, size)
            self.free_memory(data)
            if status != 1:
                return TARGET_FAILED
            self.rows += 1
            self.size += size
            rows_max -= 1
            bytes_max -= size
        return 1
