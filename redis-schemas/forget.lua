-- Ends a worker: every claim of its leases stops counting at once; the entries themselves are swept later.
--
-- KEYS[1]  kvgate:{model}:meta
-- ARGV[1]  worker id
-- ARGV[2]  process nonce: only if this process holds the id (empty = whoever holds it)
--
-- Reply    the number of leases ended. A worker that is alive all the same comes back within a second or two, under a new
--          lease and with a fresh snapshot of what it holds.
--
-- When no live worker remains, `meta` ends too.

local base = string.sub(KEYS[1], 1, -5)
local id, nonce = ARGV[1], ARGV[2] or ''
local w = base .. 'w:' .. id
local held = redis.call('HGET', w, 'nonce')
if nonce ~= '' and held and held ~= nonce then
    return 0
end

redis.call('DEL', w)
local ended, others = 0, false
local leases = redis.call('HGETALL', base .. 'leases')
for i = 1, #leases, 2 do
    local name, owner = string.match(leases[i + 1], '^(%S*) ?(.*)$')
    if name == id and (nonce == '' or owner == nonce) then
        redis.call('HDEL', base .. 'leases', leases[i])
        redis.call('ZREM', base .. 'load', leases[i])
        ended = ended + 1
    elseif redis.call('EXISTS', base .. 'w:' .. name) == 1 then
        others = true
    end
end
if not others then
    redis.call('DEL', KEYS[1])
end
return ended
