"""ZeroMQ: the only folder that imports `zmq`.

server   the server's end, and who may connect     client   a client's end
sockets  what both ends share
"""
