"""The work for each change, compiled if the installation had a C compiler.

choice.py       which implementation this process uses, and the reason
_compiled.pyx   the extension module, in Cython; _compiled.pyi declares its types

The extension handles only common cases, and returns the place where it stopped. The Python code of
`streamer.source.stream.replication_stream`, `streamer.decode.transactions`,
`streamer.apply.rows.fold` and `streamer.apply.rows.copydata` covers all cases; tests compare the
extension with that code.
"""
