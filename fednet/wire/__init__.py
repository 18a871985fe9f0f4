"""What server and clients send each other, as values and as bytes. Nothing is sent here.

A message is a small header, and at most one body: a payload or a part of it. Read in this
order: messages, frames; payload, body, codec; compress, compressors.
"""
