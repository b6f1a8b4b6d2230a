"""The work that is done once per change, compiled where a C compiler was there at installation.

choice.py       which implementation this process uses, and the reason
_compiled.pyx   the extension module, in Cython; _compiled.pyi has its types

The extension only takes common cases, and says where it stopped. The Python code of
`streamer.source.stream.replication_stream`, `streamer.decode.transactions`,
`streamer.apply.rows.fold` and `streamer.apply.rows.copydata` covers all cases; tests compare the
extension with that code.
"""
