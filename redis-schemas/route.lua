-- Where should this prompt go? The best three workers, how much of the prompt each holds, and why.
--
-- KEYS[1]     kvgate:{model}:meta
-- ARGV[1]     hashes of the prompt's whole blocks, first block first: 32 hex digits each, joined by nothing or by one
--             character such as a comma; empty = the prompt has no whole block
-- ARGV[2]     prompt tokens                                 (empty = those of the whole blocks)
-- ARGV[3]     'explain' = reply with every candidate's terms as JSON, and write nothing; 'observe' = reply as always, and
--             write nothing: the caller sends the request elsewhere
-- ARGV[4]     alpha: backlog tokens that one uncached token weighs (empty = 8)
-- ARGV[5..7]  the caller's block size, fingerprint and schema version (empty = not compared)
-- ARGV[8]     now in seconds, for replaying traces: a worker whose last heartbeat is more than 3 s older counts as dead
--             (empty = the server's clock, and a worker lives as long as its key w:<id>)
-- ARGV[9]     blocks of the prompt, where ARGV[1] has not all of them but those of the grid: each to 512, then 128 between every two
--             powers of two, and the last (empty = it has all)
--
-- Reply       {'ok', {worker, addr, lease, hit blocks, backlog, cost, reason}, ...}  one to three, best first; all strings
--             {'none'}            no live worker takes work
--             {'mismatch', text}  what differs between the caller and the workers
-- reason      'prefix' (it holds blocks, or will), 'tie' (rendezvous order among near-equals), 'load' (least cost, no hit)
--
-- The choice counts at once: the prompt's uncached tokens are added to the worker's load, and to flight:<id> for the
-- heartbeat, which takes out what the worker's own backlog has in it by then. So callers do not all run to the worker that was
-- idle at the last heartbeat. And pred:<hash> of blocks 1, 2, 4, … and the last says for ten seconds that this worker will hold
-- them, or until it has stored them, so that equal prompts which arrive before the first is computed meet. Reads work whatever
-- happens to writes: a failure of those and of the mean prompt length is ignored.

local FIELDS = 64                -- read of claims at most, at any prompt length
local OWNERS, LEAST_LOADED = 16, 8
local PAGE, SHORT = 8, 128      -- members of load read at a time; bytes of a list of leases that is looked up as a whole
local NEAR = 0.25                -- mean prompts of cost within which rendezvous order decides
local LEASE_SECONDS = 3
local RESERVED_SECONDS = 10      -- how long a worker is expected to hold, or compute, what it was sent
local EVENTS = 1000              -- kept in the stream for observers, about
local MEAN_WEIGHT = 0.01         -- of one prompt in the mean prompt length

local base = string.sub(KEYS[1], 1, -5)
local function arg(i)
    if ARGV[i] ~= nil and ARGV[i] ~= '' then
        return ARGV[i]
    end
end
local chain = arg(1) or ''
local explain = arg(3) == 'explain'
local alpha = tonumber(arg(4) or 8)
local replayed = tonumber(arg(8) or nil)
local stride = string.find(string.sub(chain, 33, 33), '^%x$') and 32 or 33
-- The script counts in places of the chain as it was given; place i is block block_at(i).
local DENSE, OCTAVE = 512, 128
local places = math.floor((#chain + stride - 32) / stride)
local blocks = tonumber(arg(9) or places)
local function block_at(i)
    if i <= DENSE or blocks == places then
        return i
    elseif i == places then
        return blocks
    end
    local octave = math.floor((i - DENSE - 1) / OCTAVE)
    return DENSE * 2 ^ octave + (i - DENSE - octave * OCTAVE) * (DENSE / OCTAVE) * 2 ^ octave
end
local function place_of(block) -- 1, 2, 4, … or the last
    if block <= DENSE or blocks == places then
        return block
    elseif block == blocks then
        return places
    end
    local octave = 0
    while DENSE * 2 ^ octave < block do
        octave = octave + 1
    end
    return DENSE + octave * OCTAVE
end

local function number(x) -- as text; whole ones in the way that is quick here
    return string.format(x == math.floor(x) and x < 1e15 and x > -1e15 and '%d' or '%.15g', x)
end
local clock = not replayed and redis.call('TIME')
local now = replayed or tonumber(clock[1]) + tonumber(clock[2]) / 1e6
local now_text = replayed and string.format('%.6f', now) or clock[1] .. '.' .. string.sub('00000' .. clock[2], -6)

-- 1. Does the caller count blocks as the workers do?
local meta = redis.call('HMGET', KEYS[1], 'block_size', 'fingerprint', 'schema', 'mean_prompt')
if not meta[1] then
    return {'none'}
end
for i, name in ipairs({'block size', 'fingerprint', 'schema version'}) do
    local own = arg(4 + i)
    if own and own ~= meta[i] then
        return {'mismatch', name .. ' is ' .. own .. ' here and ' .. meta[i] .. ' at the workers'}
    end
end
local block_size = tonumber(meta[1])
local mean_prompt = tonumber(meta[4] or 1024) or 1024 -- as register.lua starts it
local prompt_tokens = tonumber(arg(2) or blocks * block_size)

-- 2. Leases and workers. A lease is live while w:<id> exists and names it.
local named, workers = {}, {}
local function name_all(leases)
    local new = {}
    for _, lease in ipairs(leases) do
        if named[lease] == nil then
            new[#new + 1] = lease
        end
    end
    local rows = #new > 0 and redis.call('HMGET', base .. 'leases', unpack(new)) or {}
    for i, lease in ipairs(new) do
        named[lease] = rows[i] and string.match(rows[i], '^%S*')
    end
end
local function worker_of(lease)
    if workers[lease] == nil then
        workers[lease] = false
        local id = named[lease]
        if id then
            local w = redis.pcall('HMGET', base .. 'w:' .. id, 'lease', 'addr', 'state', 'at')
            if w[1] == lease and (not replayed or replayed - tonumber(w[4]) <= LEASE_SECONDS) then
                workers[lease] = {id = id, addr = w[2], lease = lease, state = w[3]}
            end
        end
    end
    return workers[lease]
end

-- 3. Who holds the block at place p: the leases that claim it, live or not, separated by commas.
local fields = 0
local function claims(p)
    local at = (p - 1) * stride
    fields = fields + 1
    local list = redis.pcall('HGET', base .. 'own:' .. string.sub(chain, at + 1, at + 4), string.sub(chain, at + 5, at + 20))
    return type(list) == 'string' and list or ''
end

-- 4. First round: places 1, 2, 4, … as far as anybody holds them. levels: each list that differs from the one before, with
--    the last of these places that it holds for. A worker that holds a block holds all before it, so its depth lies between
--    the last level that names it and twice that.
local levels = {}
local p = 1
while p <= places do
    local list = claims(p)
    if list == '' then
        break
    end
    if #levels == 0 or levels[#levels].list ~= list then
        levels[#levels + 1] = {list = list}
    end
    levels[#levels].p = p
    p = p * 2
end
local named_by = {} -- what was looked for in which list: the same list often stands for many blocks
local function in_list(list, lease)
    local known = named_by[list]
    if not known then
        known = {text = ',' .. list .. ','}
        named_by[list] = known
    end
    if known[lease] == nil then
        -- by its digits first: commas are the byte that a long list has most of
        local text, digits, at = known.text, lease .. ',', 0
        repeat
            at = string.find(text, digits, at + 1, true)
        until not at or string.byte(text, at - 1) == 44
        known[lease] = at ~= nil
    end
    return known[lease]
end
local function names(level, lease)
    return in_list(level.list, lease)
end
local function bracket(lease)
    local below, above = 0, #levels + 1
    while above - below > 1 do
        local middle = math.floor((below + above) / 2)
        if names(levels[middle], lease) then
            below = middle
        else
            above = middle
        end
    end
    if below == 0 then
        return 0, 1
    end
    return levels[below].p, math.min(2 * levels[below].p, places + 1)
end

-- 5. Candidates: at most 16 owners, those of the deepest level and then the least loaded …
local candidates, load = {}, {}
local function add(lease)
    local w = worker_of(lease)
    if not w or w.state ~= 'ready' then
        return false
    end
    if not w.backlog then
        w.backlog = load[lease]
        w.lo, w.hi = bracket(lease)
        candidates[#candidates + 1] = w
    end
    return true
end
-- The workers that take work, least loaded first, read page by page.
local ranking, ranked_all = {}, false
local function ranked(i)
    if i > #ranking and not ranked_all then
        local page = redis.call('ZRANGE', base .. 'load', #ranking, #ranking + PAGE - 1, 'WITHSCORES')
        local leases = {}
        for j = 1, #page, 2 do
            load[page[j]] = tonumber(page[j + 1])
            leases[#leases + 1] = page[j]
            ranking[#ranking + 1] = page[j]
        end
        name_all(leases)
        ranked_all = #leases < PAGE
    end
    return ranking[i]
end
-- A short list is looked up and sorted; of a long one, the ranking is read until enough of its leases were met.
local function add_owners(level)
    if #level.list > SHORT and not explain then
        local i = 1
        while #candidates < OWNERS and ranked(i) do
            if names(level, ranking[i]) then
                add(ranking[i])
            end
            i = i + 1
        end
        return
    end
    local leases, known = {}, {}
    for lease in string.gmatch(level.list, '%d+') do
        leases[#leases + 1] = #leases < 4000 and lease or nil
    end
    name_all(leases)
    for i, score in ipairs(#leases > 0 and redis.call('ZMSCORE', base .. 'load', unpack(leases)) or {}) do
        if score then
            load[leases[i]] = tonumber(score)
            known[#known + 1] = leases[i]
        elseif explain then
            worker_of(leases[i]) -- for `excluded`: it drains, or is gone
        end
    end
    table.sort(known, function(a, b)
        if load[a] ~= load[b] then
            return load[a] < load[b]
        end
        return a < b
    end)
    for _, lease in ipairs(known) do
        if #candidates >= OWNERS then
            break
        end
        add(lease)
    end
end
local deepest = #levels
while deepest > 0 and #candidates == 0 do
    add_owners(levels[deepest])
    deepest = deepest - 1
end
if deepest > 0 then
    add_owners(levels[1])
end
-- … those that were sent a part of this prompt just now, which they will hold once it is computed …
local marks, reserved = {}, {}
if blocks > 0 then
    p = 1
    while p < blocks do
        marks[#marks + 1] = p
        p = p * 2
    end
    marks[#marks + 1] = blocks
    local keys, leases = {}, {}
    for i, mark in ipairs(marks) do
        local at = (place_of(mark) - 1) * stride
        keys[i] = base .. 'pred:' .. string.sub(chain, at + 1, at + 20)
    end
    for i, mark in ipairs(redis.call('MGET', unpack(keys))) do
        local lease, since = string.match(mark or '', '^(%d+) (%S+)$')
        if lease and now - (tonumber(since) or 0) <= RESERVED_SECONDS then
            leases[#leases + 1] = not reserved[lease] and lease or nil
            reserved[lease] = marks[i]
        end
    end
    name_all(leases)
    for i, score in ipairs(#leases > 0 and redis.call('ZMSCORE', base .. 'load', unpack(leases)) or {}) do
        if score then
            load[leases[i]] = tonumber(score)
            add(leases[i])
        end
    end
end
-- … and the 8 least loaded workers.
local i, found = 1, 0
while found < LEAST_LOADED and i <= 32 * LEAST_LOADED and ranked(i) do
    found = found + (add(ranking[i]) and 1 or 0)
    i = i + 1
end
if #candidates == 0 then
    return {'none'}
end

-- 6. Narrow the brackets by halving. Candidates with one bracket are a group, which a probe splits in two: those that hold the
--    block and those that do not. First the deepest group that is left, until who holds most is known exactly; then the others in
--    turn, each as often as fields last. Who cannot become the choice, however deep within its bracket, is let be.
local function miss(depth) -- what computing the rest costs
    return alpha * math.max(prompt_tokens - depth * block_size, math.min(prompt_tokens, 1))
end
local function missed(w, missing) -- the same, of a worker with a reservation
    return reserved[w.lease] and math.min(missing, miss(reserved[w.lease])) or missing
end
local groups, by_place, bound = {}, {}, nil -- bound: somebody costs no more
for _, w in ipairs(candidates) do
    local cost = missed(w, miss(w.lo > 0 and block_at(w.lo) or 0)) + w.backlog
    bound = math.min(bound or cost, cost)
    if w.hi - w.lo > 1 then
        if not by_place[w.lo] then
            by_place[w.lo] = {}
            groups[#groups + 1] = by_place[w.lo]
        end
        table.insert(by_place[w.lo], w)
    end
end
table.sort(groups, function(a, b) return a[1].lo > b[1].lo end)
local function split(group)
    local lo, hi = group[1].lo, group[1].hi
    if hi - lo <= 1 or fields >= FIELDS then
        return
    end
    local most, missing = bound + NEAR * mean_prompt, miss(block_at(hi - 1))
    local middle, list = math.floor((lo + hi) / 2), nil
    local left = miss(block_at(middle))
    local holders, others = nil, nil
    for _, w in ipairs(group) do
        if explain or missed(w, missing) + w.backlog <= most then
            list = list or claims(middle)
            if in_list(list, w.lease) then
                w.lo = middle
                bound = math.min(bound, left + w.backlog)
                holders = holders or {}
                holders[#holders + 1] = w
            else
                w.hi = middle
                others = others or {}
                others[#others + 1] = w
            end
        end
    end
    return holders, others
end
local holders, others = groups[1], nil
while holders do
    holders, others = split(holders)
    if holders and others then
        groups[#groups + 1] = others
    end
    holders = holders or others
end
local turns = 2
while turns <= #groups and fields < FIELDS do
    holders, others = split(groups[turns])
    groups[#groups + 1] = holders
    groups[#groups + 1] = others
    turns = turns + 1
end

-- 7. cost = alpha * uncached + backlog. Within a quarter of a mean prompt of the least cost the rendezvous order decides, the
--    one that gateways fall back to without Redis; without a whole block the least loaded wins, and ties are drawn.
local turn = math.max(1, math.min(blocks, math.floor(1024 / block_size)))
local turn_hash = string.sub(chain, (turn - 1) * stride + 1, (turn - 1) * stride + 32)
if blocks == 0 then
    math.randomseed(math.floor(now * 1e6) % 2147483647)
end
local least
for _, w in ipairs(candidates) do
    w.exact = w.hi - w.lo <= 1 and (w.hi > places or w.lo == 0 or block_at(w.hi) - block_at(w.lo) <= 1)
    w.held, w.reserved = w.lo > 0 and block_at(w.lo) or 0, reserved[w.lease] or 0
    w.lo = math.max(w.held, w.reserved)
    w.uncached = math.max(prompt_tokens - w.lo * block_size, math.min(prompt_tokens, 1))
    w.cost = alpha * w.uncached + w.backlog
    least = math.min(least or w.cost, w.cost)
end
local near = least + (blocks > 0 and NEAR * mean_prompt or 0)
local n_near = 0
for _, w in ipairs(candidates) do
    w.near = w.cost <= near
    n_near = n_near + (w.near and 1 or 0)
    if w.near or explain then
        w.score = blocks > 0 and tonumber(string.sub(redis.sha1hex(turn_hash .. w.id), 1, 8), 16) or math.random(0, 2147483646)
    end
end
table.sort(candidates, function(a, b)
    if a.near ~= b.near then
        return a.near
    end
    if not a.near and a.cost ~= b.cost then
        return a.cost < b.cost
    end
    if a.near and a.score ~= b.score then
        return a.score > b.score
    end
    return a.id < b.id
end)
for _, w in ipairs(candidates) do
    w.reason = w.lo > 0 and 'prefix' or (w.near and n_near > 1 and 'tie' or 'load')
end

-- 8. The reply.
if not explain then
    if arg(3) ~= 'observe' then
        local best, flight = candidates[1], base .. 'flight:' .. candidates[1].id
        local tokens = number(best.uncached)
        local member = tokens .. ' ' .. now_text .. (replayed and ' ' .. tostring(redis.pcall('ZCARD', flight)) or '') -- no two calls at one time
        if type(redis.pcall('ZADD', flight, now, member)) == 'number' then
            redis.pcall('PEXPIRE', flight, 1000 * LEASE_SECONDS)
            redis.pcall('ZADD', base .. 'load', 'XX', 'INCR', tokens, best.lease)
            for _, mark in ipairs(marks) do
                if mark > best.held then
                    local at = (place_of(mark) - 1) * stride
                    redis.pcall('SET', base .. 'pred:' .. string.sub(chain, at + 1, at + 20),
                                best.lease .. ' ' .. now_text, 'PX', 1000 * RESERVED_SECONDS)
                end
            end
        end
        if redis.call('EXISTS', base .. 'events') == 1 then
            redis.pcall('XADD', base .. 'events', 'MAXLEN', '~', EVENTS, '*', 'event', 'route', 'worker', best.id, 'reason', best.reason,
                        'prompt_tokens', number(prompt_tokens), 'hit_blocks', number(best.lo), 'backlog', number(best.backlog), 'cost', number(best.cost))
        end
        redis.pcall('HSET', KEYS[1], 'mean_prompt', number(mean_prompt + MEAN_WEIGHT * (prompt_tokens - mean_prompt)))
    end
    local reply = {'ok'}
    for i = 1, math.min(3, #candidates) do
        local w = candidates[i]
        reply[#reply + 1] = {w.id, w.addr, w.lease, number(w.lo), number(w.backlog), number(w.cost), w.reason}
    end
    return reply
end
local lines = {}
for i, w in ipairs(candidates) do
    lines[i] = string.format('  {"rank": %d, "worker": "%s", "addr": "%s", "lease": %s, "hit_blocks": %d, "hit_exact": %s, "reserved_blocks": %d, ' ..
        '"uncached_tokens": %s, "backlog": %s, "cost": %s, "near_least": %s, "rendezvous": %d, "reason": "%s"}',
        i, w.id, w.addr, w.lease, w.lo, tostring(w.exact and w.reserved <= w.held), w.reserved, number(w.uncached), number(w.backlog), number(w.cost),
        tostring(w.near), w.score, w.reason)
end
local excluded = {}
for _, w in pairs(workers) do
    if w and not w.backlog then
        excluded[#excluded + 1] = string.format('{"worker": "%s", "state": "%s"}', w.id, w.state)
    end
end
return string.format('{"status": "ok", "blocks": %d, "block_size": %d, "prompt_tokens": %s, "alpha": %s, "mean_prompt": %s, ' ..
    '"least_cost": %s,\n "rendezvous_block": %d, "rendezvous_hash": "%s", "fields": %d, "excluded": [%s],\n' ..
    ' "candidates": [\n%s]}', blocks, block_size, number(prompt_tokens), number(alpha), number(mean_prompt), number(least),
    blocks > 0 and turn or 0, turn_hash, fields, table.concat(excluded, ', '), table.concat(lines, ',\n'))
