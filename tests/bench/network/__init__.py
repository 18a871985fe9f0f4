"""`python -m tests.bench network`: at which latency, loss, rate and dropout training still goes on.

A server and a client process run in network namespaces of their own. Between them lies a link in
user space: two TUN devices, and a thread that carries packets from one to the other, late, at a
rate, some not at all. TCP is the kernel's own, so what it does on such a link is what is measured.
"""

from __future__ import annotations
