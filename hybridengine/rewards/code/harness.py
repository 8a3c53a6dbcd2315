"""What runs inside the sandbox, before and around the program that a model wrote.

It is given to the interpreter as text and imports nothing but built-in modules, so that it starts in milliseconds. It
knows the program and, call by call, the arguments; never what is expected. Everything here is in the program's reach:
what a reply says is believed as much as if the program had returned it, and no more.

Standard input begins with a header, a marshalled tuple (mode, nonce, source, name of the module) after four bytes of
length. Mode ``call``: requests (nonce, function, args, kwargs) follow in the same form, each answered by four bytes of
length and JSON, ``{"n": nonce, "v": value, "m": the arguments afterwards}`` or ``{"n": nonce, "e": [type, message]}``,
on the standard output that the program itself does not have. Mode ``stdin``: what follows is the program's input; its
output ends with a line of the nonce and ``ok`` once the program has ended by itself.
"""


def encode(value, limit=1 << 20):
    """A value as JSON text that keeps its type: a tuple is {"t": [...]}, see decode in values.py."""
    from _json import encode_basestring_ascii as quote

    size = [0]

    def count(n):
        size[0] += n
        if size[0] > limit:
            raise ValueError(f"a value of more than {limit} parts")

    def text(v):
        count(1)
        if v is None:
            return "null"
        if v is True or v is False:
            return "true" if v else "false"
        if isinstance(v, str):
            count(str.__len__(v))
            return quote(str.__str__(v))
        if isinstance(v, int):
            v = int.__index__(v)
            return int.__repr__(v) if -(1 << 63) < v < 1 << 63 else f'{{"i":"{v:x}"}}'
        if isinstance(v, float):
            v = float.__repr__(v)
            return f'{{"f":"{v}"}}' if v in ("nan", "inf", "-inf") else v
        if isinstance(v, list):
            return "[" + ",".join([text(x) for x in list.__iter__(v)]) + "]"
        if isinstance(v, dict):
            pairs = ",".join([f"[{text(k)},{text(x)}]" for k, x in dict.items(v)])
            return f'{{"d":[{pairs}]}}'
        for of, tag in ((tuple, "t"), (set, "s"), (frozenset, "z")):
            if isinstance(v, of):
                return f'{{"{tag}":[{",".join([text(x) for x in of.__iter__(v)])}]}}'
        if isinstance(v, (bytes, bytearray)):
            count(len(v))
            return f'{{"{"b" if isinstance(v, bytes) else "a"}":"{v.hex()}"}}'
        if isinstance(v, complex):
            return f'{{"c":[{text(v.real)},{text(v.imag)}]}}'
        kind = type(v)
        name = kind.__module__ + "." + kind.__qualname__
        if kind is range:
            return f'{{"r":[{v.start},{v.stop},{v.step}]}}'
        if name in ("decimal.Decimal", "fractions.Fraction"):
            return f'{{"n":[{quote(kind.__qualname__)},{quote(str(v))}]}}'
        if name == "collections.deque":
            return f'{{"q":[{",".join([text(x) for x in v])}]}}'
        if name.startswith("numpy.") and hasattr(v, "tolist"):
            return text(v.tolist())
        return f'{{"o":{quote(name)}}}'

    return text(value)


def main():
    import marshal
    import os
    import sys

    def read(descriptor, count):
        parts = b""
        while len(parts) < count:
            part = os.read(descriptor, min(count - len(parts), 1 << 20))
            if not part:
                os._exit(3)
            parts += part
        return parts

    def receive(descriptor):
        return marshal.loads(read(descriptor, int.from_bytes(read(descriptor, 4), "big")))

    def write(descriptor, content):
        while content:
            content = content[os.write(descriptor, content) :]

    def load(source, name):
        module = type(sys)(name)
        sys.modules[name] = module
        exec(compile(source, "program.py", "exec"), module.__dict__)
        return module

    mode, nonce, source, name = receive(0)
    sys.argv = ["program.py"]
    exit, threads = os._exit, sys.modules

    if mode == "stdin":
        ended = "error"
        try:
            load(source, name)
            ended = "ok"
        except SystemExit as error:
            ended = "ok" if error.code in (None, 0) else "error"
        except BaseException as error:
            ended = "error " + type(error).__name__
        try:
            if "threading" in threads:
                threads["threading"]._shutdown()
            for stream in (sys.stdout, sys.__stdout__):
                stream.flush()
        except BaseException:
            pass
        write(1, f"\n{nonce} {ended}\n".encode())
        exit(0)

    requests, replies = os.dup(0), os.dup(1)
    os.dup2(2, 1)
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)

    def reply(nonce, body):
        content = f'{{"n":"{nonce}",{body}}}'.encode()
        write(replies, len(content).to_bytes(4, "big") + content)

    def failure(error):
        try:
            message = str(error)[:300]
        except BaseException:
            message = ""
        return f'"e":{encode([type(error).__name__, message])}'

    def find(module, name):
        """A function, or a method of the class Solution, as coding sites have it."""
        if not hasattr(module, name) and hasattr(module, "Solution"):
            return getattr(module.Solution(), name)
        return getattr(module, name)

    try:
        module = load(source, name)
        body = '"v":null'
    except BaseException as error:
        module, body = None, failure(error)
    reply(nonce, body)
    while True:
        nonce, function, args, kwargs = receive(requests)
        try:
            body = '"v":' + encode(find(module, function)(*args, **kwargs))
            if any(isinstance(x, (list, dict, set, bytearray)) for x in args):
                body += ',"m":' + encode(args)
        except BaseException as error:
            body = failure(error)
        reply(nonce, body)


if __name__ == "__main__":
    main()
