// go-redis: the pooled client in both protocols, pipelines, transactions, scripts, messages; the cluster client.
package main

import (
	"context"
	"fmt"
	"sort"
	"time"

	"github.com/redis/go-redis/v9"

	. "sparkis/clientprograms/steps"
)

var ctx = context.Background()

func main() {
	if Place == "cluster" {
		cluster()
		return
	}
	for _, protocol := range []int{2, 3} {
		client := redis.NewClient(&redis.Options{
			Addr: Address, Protocol: protocol, Username: User, Password: Password, TLSConfig: TLS(), ClientName: "program",
		})
		p := program{client, fmt.Sprintf("RESP%d ", protocol)}
		p.texts()
		if Place != "tls" {
			p.reads()
			p.changes()
			p.reconnects()
		}
		if Place == "upstream" {
			p.writes()
		}
		client.Close()
	}
	if Place == "server" {
		Step("the connections of a refused write", func() (any, error) { return connectionsOfWrite(0) })
		Step("the same with MaxRetries: -1", func() (any, error) { return connectionsOfWrite(-1) })
	}
}

// connectionsOfWrite returns how many connections a refused write takes, and its error.
func connectionsOfWrite(maxRetries int) (any, error) {
	count := 0
	client := redis.NewClient(&redis.Options{
		Addr: Address, MaxRetries: maxRetries,
		OnConnect: func(context.Context, *redis.Conn) error {
			count++
			return nil
		},
	})
	defer client.Close()
	err := client.Set(ctx, Text(7), "x", 0).Err()
	return fmt.Sprint(count, " connections: ", err), nil
}

type program struct {
	*redis.Client
	protocol string
}

func (p program) step(name string, body func() (any, error)) { Step(p.protocol+name, body) }

func (p program) texts() {
	p.step("GET", func() (any, error) { return p.Get(ctx, "job:text:007").Result() })
	p.step("a missing key", func() (any, error) { return p.Get(ctx, "job:text:none").Result() })
	p.step("MGET", func() (any, error) { return p.MGet(ctx, "job:text:001", "job:text:none", "job:text:299").Result() })
	p.step("STRLEN", func() (any, error) { return p.StrLen(ctx, "job:text:long").Result() })
	p.step("a pipeline", func() (any, error) { return pipeline(p) })
	p.step("EXISTS, TYPE, TTL", func() (any, error) {
		return []any{p.Exists(ctx, Text(7)).Val(), p.Type(ctx, Text(7)).Val(), p.TTL(ctx, Text(7)).Val()}, nil
	})
	p.step("WRONGTYPE", func() (any, error) { return p.HGetAll(ctx, Text(7)).Result() })
	p.step("a key of others", func() (any, error) { return p.HLen(ctx, "job:map:flight").Result() })
	if Place != "upstream" {
		p.step("a refused write", func() (any, error) { return p.Set(ctx, Text(7), "x", 0).Result() })
		p.step("a read after it", func() (any, error) { return p.Get(ctx, Text(7)).Result() })
		p.step("a refused transaction", func() (any, error) {
			return p.TxPipelined(ctx, func(pipe redis.Pipeliner) error { return pipe.Set(ctx, Text(7), "x", 0).Err() })
		})
	}
}

// pipeline reads all texts in one pipeline.
func pipeline(client redis.Cmdable) ([]string, error) {
	commands, err := client.Pipelined(ctx, func(pipe redis.Pipeliner) error {
		for _, key := range AllTexts() {
			pipe.Get(ctx, key)
		}
		return nil
	})
	found := make([]string, len(commands))
	for i, each := range commands {
		found[i] = each.(*redis.StringCmd).Val()
	}
	return found, err
}

func (p program) reads() {
	p.step("HGETALL", func() (any, error) { return p.HGetAll(ctx, "job:map:flight").Result() })
	p.step("HMGET", func() (any, error) { return p.HMGet(ctx, "job:map:flight", "to", "none").Result() })
	p.step("HSCAN", func() (any, error) {
		fields, all := map[string]bool{}, p.HScan(ctx, "job:map:large", 0, "", 0).Iterator()
		for at := 0; all.Next(ctx); at++ {
			if at%2 == 0 {
				fields[all.Val()] = true
			}
		}
		return len(fields), all.Err()
	})
	p.step("LRANGE", func() (any, error) { return p.LRange(ctx, "job:list:alerts", 0, -1).Result() })
	p.step("SMEMBERS", func() (any, error) { return sorted(p.SMembers(ctx, "job:set:airports").Result()) })
	p.step("ZRANGE", func() (any, error) { return p.ZRangeWithScores(ctx, "job:ranks:delays", 0, -1).Result() })
	p.step("ZSCORE", func() (any, error) { return p.ZScore(ctx, "job:ranks:delays", "PRG").Result() })
	p.step("SCAN", func() (any, error) {
		var keys []string
		all := p.Scan(ctx, 0, "job:text:1*", 1000).Iterator()
		for all.Next(ctx) {
			keys = append(keys, all.Val())
		}
		return sorted(keys, all.Err())
	})
	p.step("MULTI", func() (any, error) {
		commands, err := p.TxPipelined(ctx, func(pipe redis.Pipeliner) error {
			pipe.Get(ctx, Text(7))
			pipe.HGet(ctx, "job:map:flight", "to")
			pipe.LRange(ctx, "job:list:alerts", 0, 0)
			return nil
		})
		return texts(commands), err
	})
}

// changes is what a client notices when a state changes: a watched key, a notification.
func (p program) changes() {
	p.step("WATCH", func() (any, error) {
		Ask("put", "job:text:watched", "1")
		var found []any
		for _, isChanged := range []bool{true, false} {
			err := p.Watch(ctx, func(tx *redis.Tx) error {
				if isChanged {
					Ask("put", "job:text:watched", "2")
				}
				commands, err := tx.TxPipelined(ctx, func(pipe redis.Pipeliner) error {
					pipe.Get(ctx, "job:text:watched")
					return nil
				})
				found = append(found, texts(commands))
				return err
			}, "job:text:watched")
			found = append(found, err)
		}
		return found, nil
	})
	p.step("keyspace notifications", func() (any, error) {
		messages, end := p.subscribed("__keyspace@0__:job:text:live")
		defer end()
		Ask("put", "job:text:live", "1")
		set, err := Next(messages)
		if err != nil {
			return nil, err
		}
		Ask("delete", "job:text:live")
		del, err := Next(messages)
		return []any{set, del}, err
	})
}

// subscribed returns the messages of a channel after the subscription is confirmed.
func (p program) subscribed(channel string) (<-chan *redis.Message, func()) {
	subscription := p.Subscribe(ctx, channel)
	if _, err := subscription.Receive(ctx); err != nil {
		panic(err)
	}
	return subscription.Channel(), func() { subscription.Close() }
}

func (p program) reconnects() {
	p.step("after its connection was killed", func() (any, error) {
		id := p.ClientID(ctx).Val()
		other := redis.NewClient(p.Options())
		defer other.Close()
		killed := other.ClientKillByFilter(ctx, "ID", fmt.Sprint(id)).Val()
		found, err := p.Get(ctx, Text(7)).Result()
		return []any{killed, found}, err
	})
}

func (p program) writes() {
	p.step("SET, GET", func() (any, error) {
		return []any{p.Set(ctx, "own:text", "a", 0).Val(), p.Get(ctx, "own:text").Val()}, nil
	})
	p.step("SET NX PX", func() (any, error) {
		return []any{
			p.SetNX(ctx, "own:lock", "me", time.Minute).Val(), p.SetNX(ctx, "own:lock", "you", time.Minute).Val(),
			p.PTTL(ctx, "own:lock").Val() > 0, p.Del(ctx, "own:lock").Val(),
		}, nil
	})
	p.step("hashes, lists, sets", func() (any, error) {
		return []any{
			p.HSet(ctx, "own:map", "f", "v").Val(), p.HIncrBy(ctx, "own:map", "n", 5).Val(), p.HGetAll(ctx, "own:map").Val(),
			p.RPush(ctx, "own:list", "a", "b").Val(), p.BLPop(ctx, time.Second, "own:list").Val(),
			p.SAdd(ctx, "own:set", "x", "y").Val(), p.ZAdd(ctx, "own:ranks", redis.Z{Score: 1.5, Member: "a"}).Val(),
			p.ZRangeWithScores(ctx, "own:ranks", 0, -1).Val(),
		}, nil
	})
	p.step("a blocked BLPOP", func() (any, error) {
		go func() {
			UntilEqual(func() (bool, error) { return p.isBlocked(), nil }, true)
			p.RPush(ctx, "own:queue", "job")
		}()
		return p.BLPop(ctx, time.Minute, "own:queue").Result()
	})
	p.step("keys of both", func() (any, error) { return p.MGet(ctx, "own:text", Text(7), "none").Result() })
	p.step("MULTI of both", func() (any, error) {
		commands, err := p.TxPipelined(ctx, func(pipe redis.Pipeliner) error {
			pipe.Incr(ctx, "own:counter")
			pipe.Get(ctx, Text(7))
			pipe.Set(ctx, "own:text", "b", 0)
			return nil
		})
		return texts(commands), err
	})
	p.step("WATCH of one's own", func() (any, error) {
		err := p.Watch(ctx, func(tx *redis.Tx) error {
			p.Set(ctx, "own:text", "c", 0)
			_, err := tx.TxPipelined(ctx, func(pipe redis.Pipeliner) error {
				pipe.Set(ctx, "own:text", "lost", 0)
				return nil
			})
			return err
		}, "own:text")
		return []any{err, p.Get(ctx, "own:text").Val()}, nil
	})
	p.step("a script", func() (any, error) {
		script := redis.NewScript("redis.call('SET', KEYS[1], ARGV[1]) return redis.call('GET', KEYS[1])")
		return script.Run(ctx, p, []string{"own:text"}, "d").Result()
	})
	p.step("a stream", p.stream)
	p.step("messages", func() (any, error) {
		messages, end := p.subscribed("own:channel")
		defer end()
		receivers := p.Publish(ctx, "own:channel", "hello").Val()
		message, err := Next(messages)
		return []any{receivers, message}, err
	})
	p.step("an expired key's notification", func() (any, error) {
		messages, end := p.subscribed("__keyevent@0__:expired")
		defer end()
		p.Set(ctx, "own:brief", "x", 20*time.Millisecond)
		return Next(messages)
	})
	p.step("DEL", func() (any, error) {
		return p.Del(ctx, "own:text", "own:map", "own:set", "own:ranks", "own:stream", "own:counter", "own:list").Result()
	})
}

// isBlocked returns whether a client waits for a key.
func (p program) isBlocked() bool {
	return p.InfoMap(ctx, "clients").Item("Clients", "blocked_clients") == "1"
}

func (p program) stream() (any, error) {
	p.XGroupCreateMkStream(ctx, "own:stream", "group", "0")
	p.XAdd(ctx, &redis.XAddArgs{Stream: "own:stream", ID: "1-1", Values: []string{"f", "v"}})
	found, err := p.XReadGroup(ctx, &redis.XReadGroupArgs{
		Group: "group", Consumer: "me", Streams: []string{"own:stream", ">"}, Count: 5,
	}).Result()
	return []any{found, p.XAck(ctx, "own:stream", "group", "1-1").Val(), p.XLen(ctx, "own:stream").Val()}, err
}

func cluster() {
	client := redis.NewClusterClient(&redis.ClusterOptions{Addrs: []string{Address}})
	defer client.Close()
	read := func() ([]string, error) {
		found := make([]string, Texts)
		for i, key := range AllTexts() {
			value, err := client.Get(ctx, key).Result()
			if err != nil {
				return nil, err
			}
			found[i] = value
		}
		return found, nil
	}
	expected, err := read()
	Step("GET", func() (any, error) { return expected, err })
	Step("MGET of one slot", func() (any, error) { return client.MGet(ctx, "job:text:{a}", "job:text:{a}b").Result() })
	Step("a pipeline", func() (any, error) { return pipeline(client) })
	Step("a map", func() (any, error) { return client.HGetAll(ctx, "job:map:flight").Result() })
	byDefault := subscriber(&redis.ClusterOptions{Addrs: []string{Address}})
	eachSecond := subscriber(&redis.ClusterOptions{Addrs: []string{Address}, ClusterStateReloadInterval: time.Second})
	Step("after a server's end", func() (any, error) {
		Ask("kill", Text(7))
		return UntilEqual(read, expected)
	})
	Step("a new value after it", func() (any, error) {
		Ask("put", "job:text:live", "2")
		return UntilEqual(client.Get(ctx, "job:text:live").Result, "2")
	})
	Step("a subscription that reads the slots each second", func() (any, error) {
		_, err := eachSecond(client)
		return "goes on", err
	})
	Step("a subscription by default goes on after a minute", func() (any, error) {
		since, err := byDefault(client)
		return since >= time.Minute, err
	})
}

// subscriber subscribes to a channel of the node that will end. The result sends messages to the channel until one arrives, and returns
// the time since the subscription. The client only subscribes: what else a client asks finds out that the node has ended.
func subscriber(options *redis.ClusterOptions) func(*redis.ClusterClient) (time.Duration, error) {
	channel := "own:{" + Text(7) + "}"
	start := time.Now()
	subscription := redis.NewClusterClient(options).Subscribe(ctx, channel)
	if _, err := subscription.Receive(ctx); err != nil {
		panic(err)
	}
	messages := subscription.Channel()
	return func(client *redis.ClusterClient) (time.Duration, error) {
		_, err := UntilEqual(func() (bool, error) {
			if err := client.Publish(ctx, channel, "hello").Err(); err != nil {
				return false, err
			}
			select {
			case <-messages:
				return true, nil
			default:
				return false, nil
			}
		}, true)
		return time.Since(start), err
	}
}

func sorted(texts []string, err error) ([]string, error) {
	sort.Strings(texts)
	return texts, err
}

// texts returns what commands have returned.
func texts(commands []redis.Cmder) []string {
	found := make([]string, len(commands))
	for i, each := range commands {
		found[i] = each.String()
	}
	return found
}
