-- A worker lives: its load, its TTL, and a little sweeping for all.
--
-- KEYS[1]  kvgate:{model}:meta
-- ARGV     worker id, process nonce, lease (the pending one while there is one), state ('ready', 'draining'), running,
--          waiting, blocks used, blocks total, backlog tokens, now in seconds (empty = the server's clock)
--
-- Reply    {'ok'}
--          {'resync', why}   unknown lease or wrong nonce: take a new lease and send a snapshot
--          {'superseded'}    another process holds this worker id: exit
--
-- A draining worker stays in w:<id> but leaves `load`, so that nobody considers it for new work.

local TTL_MS = 3000
local FLIGHT_SECONDS = 0.5               -- after which a request that was sent here is in the backlog: a step at most
local SAMPLES = 4                        -- members of load and of leases looked at
local SWEEP_BUCKETS, SWEEP_CLAIMS = 64, 256 -- own buckets looked at, until this many fields were seen

local base = string.sub(KEYS[1], 1, -5)
local id, nonce, lease, state, running, waiting, used, total, backlog, now = unpack(ARGV)
local w = base .. 'w:' .. id
if not now or now == '' then
    local clock = redis.call('TIME')
    now = string.format('%d.%06d', clock[1], clock[2])
end

local held = redis.call('HMGET', w, 'nonce', 'lease', 'next')
if held[1] and held[1] ~= nonce then
    return {'superseded'}
end
if lease ~= (held[3] or held[2]) then
    return {'resync', held[1] and 'lease ' .. lease .. ' is not the current one' or 'w:' .. id .. ' is gone'}
end
if redis.call('HGET', base .. 'leases', lease) ~= id .. ' ' .. nonce then
    return {'resync', 'lease ' .. lease .. ' is unknown'}
end

-- PEXPIRE first: it needs no memory, and Redis then lets the script finish when it is out of memory.
redis.call('PEXPIRE', w, TTL_MS)
if redis.call('PEXPIRE', KEYS[1], TTL_MS) == 0 then
    return {'resync', 'meta is gone'}
end
redis.call('HSET', w, 'state', state, 'running', running, 'waiting', waiting, 'blocks_used', used, 'blocks_total', total,
           'backlog', backlog, 'at', now)
redis.call('HINCRBY', w, 'beat', 1)
-- What gateways sent just now may not be in the backlog yet.
local flight = base .. 'flight:' .. id
if type(redis.pcall('ZREMRANGEBYSCORE', flight, '-inf', now - FLIGHT_SECONDS)) ~= 'number' then
    redis.call('DEL', flight) -- somebody else's value under our name
end
local load = tonumber(backlog)
for _, sent in ipairs(redis.call('ZRANGE', flight, 0, -1)) do
    load = load + (tonumber(string.match(sent, '^%S*')) or 0)
end
if held[2] and state == 'ready' then
    redis.call('ZADD', base .. 'load', load, held[2])
elseif held[2] then
    redis.call('ZREM', base .. 'load', held[2])
end

-- Sweep: leases whose worker is gone leave `load` and `leases`, and a few buckets lose the claims of dead leases.
local alive = {}
local function live(number)
    if alive[number] == nil then
        local named = redis.call('HGET', base .. 'leases', number)
        local now_held = named and redis.pcall('HMGET', base .. 'w:' .. string.match(named, '^%S*'), 'lease', 'next')
        alive[number] = now_held and (now_held[1] == number or now_held[2] == number) or false
    end
    return alive[number]
end
local sampled = redis.call('ZRANDMEMBER', base .. 'load', SAMPLES)
for _, number in ipairs(redis.call('HRANDFIELD', base .. 'leases', SAMPLES)) do
    sampled[#sampled + 1] = number
end
for _, number in ipairs(sampled) do
    if not live(number) then
        redis.call('ZREM', base .. 'load', number)
        redis.call('HDEL', base .. 'leases', number)
    end
end
local cursor = tonumber(redis.call('HGET', KEYS[1], 'sweep') or 0)
local seen, buckets = 0, 0
while buckets < SWEEP_BUCKETS and seen < SWEEP_CLAIMS do
    local own = string.format('%sown:%04x', base, cursor)
    local claims = redis.pcall('HGETALL', own)
    if claims.err then
        if not string.find(claims.err, 'WRONGTYPE', 1, true) then
            return claims
        end
        redis.call('DEL', own) -- somebody else's value under our name
    end
    for i = 1, #claims, 2 do
        if not alive[claims[i + 1]] then -- most fields name one live lease
            local kept, dropped = {}, false
            for number in string.gmatch(claims[i + 1], '%d+') do
                if live(number) then
                    kept[#kept + 1] = number
                else
                    dropped = true
                end
            end
            if #kept == 0 then
                redis.call('HDEL', own, claims[i])
            elseif dropped then
                redis.call('HSET', own, claims[i], table.concat(kept, ','))
            end
        end
    end
    seen = seen + #claims / 2
    buckets = buckets + 1
    cursor = (cursor + 1) % 65536
end
redis.call('HSET', KEYS[1], 'sweep', cursor)
return {'ok'}
