"""The language between processes: samples, grids, codec, messages and errors. No torch, no sockets."""
