#!/usr/bin/env python3
"""usage: embed_lua.py FILE.lua... > scripts.h      each script as a C array with its SHA1, for EVALSHA"""
import hashlib
import os
import sys

print("/* Generated from the scripts of redis-schemas/. */\n#include <stddef.h>\n")
for path in sorted(sys.argv[1:]):
    source = open(path, "rb").read()
    name = os.path.basename(path)[:-4]
    values = ",".join(str(b) for b in source)
    print(f"static const char script_{name}[] = {{{values},0}};")
    print(f"enum {{ script_{name}_len = {len(source)} }};")
    print(f'#define SCRIPT_{name.upper()}_SHA1 "{hashlib.sha1(source).hexdigest()}"\n')
