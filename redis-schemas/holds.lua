-- What does a worker hold? A chunk of its claims, from a cursor on.
--
-- KEYS[1]  kvgate:{model}:meta
-- ARGV[1]  worker id
-- ARGV[2]  cursor: 0 at first, then what the last call answered
-- ARGV[3]  'count' = the number of claims in this chunk, instead of the claims
--
-- Reply    {next cursor, or 'end', and then the first 20 hex digits of each block's hash, or their number}
--          {'not live'} when the worker is not
--
-- A call looks at 4,096 of the 65,536 buckets, or fewer once it saw 2,000 fields, so that it never holds Redis up. Reads
-- only. Claims that change between two calls may be missed, or told though they are gone.

local BUCKETS, FIELDS = 4096, 2000

local base = string.sub(KEYS[1], 1, -5)
local lease = redis.call('HGET', base .. 'w:' .. ARGV[1], 'lease')
if not lease then
    return {'not live'}
end
local cursor = tonumber(ARGV[2] or 0)
local last = math.min(cursor + BUCKETS, 65536)
local wanted = ',' .. lease .. ','
local found, seen = {}, 0
while cursor < last and seen < FIELDS do
    local bucket = string.format('%04x', cursor)
    local claims = redis.call('HGETALL', base .. 'own:' .. bucket)
    for i = 1, #claims, 2 do
        if string.find(',' .. claims[i + 1] .. ',', wanted, 1, true) then
            found[#found + 1] = bucket .. claims[i]
        end
    end
    seen = seen + #claims / 2
    cursor = cursor + 1
end
local next_cursor = cursor < 65536 and tostring(cursor) or 'end'
if ARGV[3] == 'count' then
    return {next_cursor, tostring(#found)}
end
table.insert(found, 1, next_cursor)
return found
