-- A worker takes a lease: at its start, and again after RESYNC. The lease is pending until publish.lua switches it live.
--
-- KEYS[1]  kvgate:{model}:meta
-- ARGV     worker id, process nonce, 'first' or 'again', block size, fingerprint, schema version, addr, version,
--          now in seconds (empty = the server's clock)
--
-- Reply    {'ok', lease}
--          {'mismatch', text}  the model's live workers count blocks otherwise: do not publish, try again
--          {'superseded'}      another process holds this worker id ('again'), exit
--
-- 'first' takes the id over from any other process: its leases end here, and its next call answers 'superseded'.
-- 'again' keeps the caller's old lease live until the new one is complete.

local TTL_MS, MEAN_PROMPT = 3000, 1024

local base = string.sub(KEYS[1], 1, -5)
local id, nonce, turn, block_size, fingerprint, schema, addr, version, now = unpack(ARGV)
local w = base .. 'w:' .. id
if not now or now == '' then
    local clock = redis.call('TIME')
    now = string.format('%d.%06d', clock[1], clock[2])
end

local meta = redis.call('HMGET', KEYS[1], 'block_size', 'fingerprint', 'schema')
for i, name in ipairs({'block size', 'fingerprint', 'schema version'}) do
    local own = ({block_size, fingerprint, schema})[i]
    if meta[i] and meta[i] ~= own then
        return {'mismatch', name .. ' is ' .. own .. ' here and ' .. meta[i] .. ' at the live workers'}
    end
end
local held = redis.call('HMGET', w, 'nonce', 'lease', 'next')
if held[1] and held[1] ~= nonce and turn ~= 'first' then
    return {'superseded'}
end

-- A write that needs no memory comes first: Redis then lets this script finish when it is out of memory. Else, once
-- dead claims filled it, no worker could register, and so none could sweep them.
redis.call('HDEL', w, '')
local lease = tostring(redis.call('INCR', base .. 'lease'))
local ended = {held[3]}
if held[1] and held[1] ~= nonce then
    ended = {held[2], held[3]}
    redis.call('DEL', w, base .. 'flight:' .. id)
end
for _, old in pairs(ended) do
    if old then
        redis.call('HDEL', base .. 'leases', old)
        redis.call('ZREM', base .. 'load', old)
    end
end
redis.call('HSET', base .. 'leases', lease, id .. ' ' .. nonce)
redis.call('HSET', w, 'nonce', nonce, 'next', lease, 'next_seq', 0, 'addr', addr, 'version', version, 'at', now)
redis.call('PEXPIRE', w, TTL_MS)
redis.call('HSET', KEYS[1], 'block_size', block_size, 'fingerprint', fingerprint, 'schema', schema)
redis.call('HSETNX', KEYS[1], 'mean_prompt', MEAN_PROMPT)
redis.call('PEXPIRE', KEYS[1], TTL_MS)
return {'ok', lease}
