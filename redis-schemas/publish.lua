-- A worker stored and evicted blocks: one batch of events, in order.
--
-- KEYS[1]  kvgate:{model}:meta
-- ARGV     worker id, process nonce, lease, sequence number of the batch (1 for a lease's first), 'live' or '',
--          events: '+' (stored) or '-' (evicted) and the first 20 hex digits of the block's hash, 21 bytes each
--
-- Reply    {'ok'}
--          {'resync', why}   unknown lease, wrong nonce, or a gap: take a new lease and send a snapshot
--          {'superseded'}    another process holds this worker id: exit
--
-- A batch that was applied before is 'ok' and changes nothing. 'live' ends a snapshot: from here on the pending lease is
-- the worker's lease, and the claims under its old one count no more.

local base = string.sub(KEYS[1], 1, -5)
local id, nonce, lease, seq, live_now, events = unpack(ARGV)
local w = base .. 'w:' .. id
seq = tonumber(seq)

local held = redis.call('HMGET', w, 'nonce', 'lease', 'seq', 'next', 'next_seq', 'state', 'backlog')
if held[1] and held[1] ~= nonce then
    return {'superseded'}
end
local seq_field, last
if held[4] == lease then
    seq_field, last = 'next_seq', tonumber(held[5])
elseif held[2] == lease then
    seq_field, last = 'seq', tonumber(held[3])
else
    return {'resync', held[1] and 'lease ' .. lease .. ' is not the current one' or 'w:' .. id .. ' is gone'}
end
if seq <= last then
    return {'ok'}
end
if seq > last + 1 then
    return {'resync', 'batch ' .. seq .. ' came after batch ' .. last}
end

-- When Redis is out of memory, a batch that stores fails here, before anything is written; one that only evicts needs no
-- memory, and its first write lets the script finish.
if string.find(events, '+', 1, true) then
    redis.call('HSET', w, seq_field, last)
else
    redis.call('HDEL', w, '')
end

local alive = {[lease] = true}
local function live(number)
    if alive[number] == nil then
        local named = redis.call('HGET', base .. 'leases', number)
        local now_held = named and redis.pcall('HMGET', base .. 'w:' .. string.match(named, '^%S*'), 'lease', 'next')
        alive[number] = now_held and (now_held[1] == number or now_held[2] == number) or false
    end
    return alive[number]
end

local settled = {} -- reservations of blocks that are there now: from here on the claims tell
for at = 1, #events, 21 do
    local own, field = base .. 'own:' .. string.sub(events, at + 1, at + 4), string.sub(events, at + 5, at + 20)
    local stored = string.byte(events, at) == 43
    settled[#settled + 1] = stored and base .. 'pred:' .. string.sub(events, at + 1, at + 20) or nil
    local list
    local fresh = stored and redis.pcall('HSETNX', own, field, lease)
    if type(fresh) == 'table' then
        if not string.find(fresh.err, 'WRONGTYPE', 1, true) then
            return fresh
        end
        redis.call('DEL', own) -- somebody else's value under our name
        fresh = redis.call('HSETNX', own, field, lease)
    end
    if fresh ~= 1 then
        list = redis.pcall('HGET', own, field)
    end
    if type(list) == 'table' then
        list = nil
    end
    if list == lease and not stored then
        redis.call('HDEL', own, field)
    elseif list and list ~= lease then
        -- Whoever writes a field drops the dead leases from it.
        local kept = {}
        for number in string.gmatch(list, '%d+') do
            if number ~= lease and live(number) then
                kept[#kept + 1] = number
            end
        end
        if stored then
            kept[#kept + 1] = lease
        end
        if #kept == 0 then
            redis.call('HDEL', own, field)
        else
            redis.call('HSET', own, field, table.concat(kept, ','))
        end
    end
end

for first = 1, #settled, 1000 do
    redis.call('DEL', unpack(settled, first, math.min(first + 999, #settled)))
end

local evicted = select(2, string.gsub(events, '%-', ''))
redis.pcall('XADD', base .. 'events', 'NOMKSTREAM', 'MAXLEN', '~', 1000, '*', 'event', 'publish', 'worker', id, 'stored', #events / 21 - evicted,
            'evicted', evicted)
redis.call('HSET', w, seq_field, seq)
if live_now == 'live' and seq_field == 'next_seq' then
    redis.call('HSET', w, 'lease', lease, 'seq', seq, 'beat', 0)
    redis.call('HDEL', w, 'next', 'next_seq')
    if held[2] then
        redis.call('ZREM', base .. 'load', held[2])
        redis.call('HDEL', base .. 'leases', held[2])
    end
    if not held[6] then
        redis.call('HSET', w, 'state', 'ready')
    end
    if (held[6] or 'ready') == 'ready' then
        redis.call('ZADD', base .. 'load', held[7] or 0, lease)
    end
end
return {'ok'}
