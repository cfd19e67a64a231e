-- All live workers of a model: the gateway's once-a-second poll, and an operator's table.
--
-- KEYS[1]  kvgate:{model}:meta
-- ARGV[1]  'table' = one text with a header and a line a worker, instead of the reply below
-- ARGV[2]  now in seconds, as in route.lua (empty = the server's clock)
--
-- Reply    an array of {worker, addr, lease, beat, state, running, waiting, blocks used, blocks total, backlog, version},
--          all strings, ordered by worker id. beat counts the heartbeats of this lease; state is 'ready' or 'draining'.
--
-- Reads only.

local FIELDS = {'addr', 'lease', 'beat', 'state', 'running', 'waiting', 'blocks_used', 'blocks_total', 'backlog', 'version'}
local LEASE_SECONDS = 3

local base = string.sub(KEYS[1], 1, -5)
local replayed = tonumber(ARGV[2] or '')
local leases = redis.call('HGETALL', base .. 'leases')
local workers = {}
for i = 1, #leases, 2 do
    local id = string.match(leases[i + 1], '^%S*')
    local key = base .. 'w:' .. id
    local w = redis.pcall('HMGET', key, unpack(FIELDS))
    local at = replayed and tonumber(redis.call('HGET', key, 'at') or 0)
    if w[2] == leases[i] and (not at or replayed - at <= LEASE_SECONDS) then
        table.insert(w, 1, id)
        workers[#workers + 1] = w
    end
end
table.sort(workers, function(a, b) return a[1] < b[1] end)
if ARGV[1] ~= 'table' then
    return workers
end

local format = '%-20s %-24s %7s %7s %-9s %7s %7s %11s %12s %9s %s'
local lines = {string.format(format, 'worker', 'addr', 'lease', 'beat', 'state', 'running', 'waiting', 'blocks_used',
                             'blocks_total', 'backlog', 'version')}
for _, w in ipairs(workers) do
    lines[#lines + 1] = string.format(format, unpack(w))
end
return table.concat(lines, '\n')
