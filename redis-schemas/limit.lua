-- May this key send a request of so many tokens? Two token buckets, one of requests and one of tokens, which all gateways share.
--
-- KEYS[1]     kvgate:limit:{<40 hex>}: the SHA-1 of the limit's name, a colon and the key
-- ARGV[1]     tokens of the request
-- ARGV[2..3]  requests a second that the key earns, and how many it can save up   (empty = requests are not limited)
-- ARGV[4..5]  the same of tokens                                                  (empty = tokens are not limited)
-- ARGV[6]     now in seconds (empty = the server's clock)
--
-- Reply       {why, retry after, requests left, until full, tokens left, until full}: all strings, times in seconds; left and until
--             full are empty where that is not limited
-- why         'ok': it is admitted and counted. 'requests' or 'tokens': it is not, and counts for nothing; the same request would be
--             admitted after `retry after`, or never (-1: it alone is more than can be saved up)
--
-- A bucket holds what was used and has not come back yet: it leaks at the rate, and admits what it still has room for. So within any
-- time t no more than rate * t + burst passes. A key that nobody uses expires when its buckets are empty.

local tokens = tonumber(ARGV[1])
local now = tonumber(ARGV[6] or '')
if not now then
    local clock = redis.call('TIME')
    now = tonumber(clock[1]) + tonumber(clock[2]) / 1e6
end

local held = redis.call('HMGET', KEYS[1], 'requests', 'tokens', 'at')
local passed = math.max(0, now - (tonumber(held[3] or now) or now))
local function bucket(name, used, need, rate, burst)
    if not rate or rate == '' then
        return {name = name, free = true}
    end
    rate, burst = tonumber(rate), tonumber(burst)
    used = math.max(0, (tonumber(used or 0) or 0) - passed * rate)
    return {name = name, used = used, need = need, rate = rate, burst = burst}
end
local buckets = {bucket('requests', held[1], 1, ARGV[2], ARGV[3]), bucket('tokens', held[2], tokens, ARGV[4], ARGV[5])}

local why, wait = 'ok', 0
for _, b in ipairs(buckets) do
    if not b.free and b.used + b.need > b.burst then
        local until_room = b.need > b.burst and -1 or (b.used + b.need - b.burst) / b.rate
        if why == 'ok' or wait >= 0 and (until_room < 0 or until_room > wait) then
            why, wait = b.name, until_room
        end
    end
end

local empty = 0
if why == 'ok' then
    local write = {'at', string.format('%.6f', now)}
    for _, b in ipairs(buckets) do
        if not b.free then
            b.used = b.used + b.need
            write[#write + 1] = b.name
            write[#write + 1] = string.format('%.17g', b.used)
            empty = math.max(empty, b.used / b.rate)
        end
    end
    redis.call('HSET', KEYS[1], unpack(write))
    redis.call('PEXPIRE', KEYS[1], math.ceil(1000 * empty) + 1000)
end

local reply = {why, string.format('%.6f', wait)}
for _, b in ipairs(buckets) do
    reply[#reply + 1] = b.free and '' or string.format('%.0f', math.floor(b.burst - b.used))
    reply[#reply + 1] = b.free and '' or string.format('%.6f', b.used / b.rate)
end
return reply
