// The Go clients under load: `clients CLIENT PORT PREFIX KEYS`, where CLIENT is one of those below.
//
// Each line of the input is a workload, the number of its tasks, and seconds; the reply to it is a line of JSON.
// benchmarks/clients/programs.py describes workloads and keys, which are the same for all clients.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"log"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
)

const (
	manyKeys      = 20
	pipelinedKeys = 100
	fields        = 20
	keysOfAMap    = 10 // one map for so many keys
)

// A client, as people use it: one for all tasks.
type client interface {
	get(ctx context.Context, key string) (string, error)
	mget(ctx context.Context, keys []string) ([]string, error)
	hgetall(ctx context.Context, key string) (map[string]string, error)
	pipeline(ctx context.Context, keys []string) ([]string, error)
	transaction(ctx context.Context, first, second string) ([]string, error)
	set(ctx context.Context, key, value string) error
	// increment adds one in an optimistic transaction; false: another client has changed the key meanwhile.
	increment(ctx context.Context, key string) (bool, error)
	number(ctx context.Context, key string) (int, error)
}

// The keys of a place. All tasks walk through them together.
type keys struct {
	prefix string
	count  int64
	last   atomic.Int64
}

func (k *keys) next() int64 { return k.last.Add(1) % k.count }

func (k *keys) text(number int64) string { return fmt.Sprintf("%s:text:%d", k.prefix, number%k.count) }

func (k *keys) value(number int64) string { return fmt.Sprintf("value:%d", number%k.count) }

func (k *keys) texts(number, count int64) []string {
	found := make([]string, count)
	for i := range found {
		found[i] = k.text(number + int64(i))
	}
	return found
}

func (k *keys) areValues(found []string, number int64) bool {
	for i, value := range found {
		if value != k.value(number+int64(i)) {
			return false
		}
	}
	return true
}

// A call sends one request, or one pipeline or transaction, and returns whether its reply is right.
type call func(ctx context.Context) (bool, error)

func (k *keys) workloads(c client) map[string]call {
	counter := k.prefix + ":counter"
	return map[string]call{
		"get": func(ctx context.Context) (bool, error) {
			n := k.next()
			found, err := c.get(ctx, k.text(n))
			return found == k.value(n), err
		},
		"mget": func(ctx context.Context) (bool, error) {
			n := k.next()
			found, err := c.mget(ctx, k.texts(n, manyKeys))
			return len(found) == manyKeys && k.areValues(found, n), err
		},
		"hgetall": func(ctx context.Context) (bool, error) {
			n := k.next() / keysOfAMap
			found, err := c.hgetall(ctx, fmt.Sprintf("%s:map:%d", k.prefix, n))
			return len(found) == fields && found["field:7"] == fmt.Sprintf("%d:7", n), err
		},
		"pipeline": func(ctx context.Context) (bool, error) {
			n := k.next()
			found, err := c.pipeline(ctx, k.texts(n, pipelinedKeys))
			return len(found) == pipelinedKeys && k.areValues(found, n), err
		},
		"transaction": func(ctx context.Context) (bool, error) {
			n := k.next()
			found, err := c.transaction(ctx, k.text(n), k.text(n+1))
			return len(found) == 2 && k.areValues(found, n), err
		},
		"set": func(ctx context.Context) (bool, error) {
			n := k.next()
			return true, c.set(ctx, fmt.Sprintf("%s:written:%d", k.prefix, n), k.value(n))
		},
		"optimistic": func(ctx context.Context) (bool, error) {
			for {
				if done, err := c.increment(ctx, counter); done || err != nil {
					return true, err
				}
			}
		},
	}
}

// What a measurement found, as JSON. Error is the text of one of the errors.
type outcome struct {
	Requests int     `json:"requests"`
	Seconds  float64 `json:"seconds"`
	Errors   int     `json:"errors"`
	Wrong    int     `json:"wrong"`
	Error    string  `json:"error,omitempty"`
}

func measure(do call, tasks int, seconds float64) outcome {
	var total outcome
	var lock sync.Mutex
	var running sync.WaitGroup
	began := time.Now()
	ends := began.Add(time.Duration(seconds * float64(time.Second)))
	for range tasks {
		running.Add(1)
		go func() {
			defer running.Done()
			var own outcome
			for own.Requests == 0 || time.Now().Before(ends) {
				isRight, err := do(context.Background())
				own.Requests++
				if err != nil {
					own.Errors++
					own.Error = err.Error()
				} else if !isRight {
					own.Wrong++
				}
			}
			lock.Lock()
			defer lock.Unlock()
			total.Requests += own.Requests
			total.Errors += own.Errors
			total.Wrong += own.Wrong
			if own.Error != "" {
				total.Error = own.Error
			}
		}()
	}
	running.Wait()
	total.Seconds = time.Since(began).Seconds()
	return total
}

// run measures a workload. The counter of optimistic transactions must have grown by their number.
func (k *keys) run(c client, workload string, tasks int, seconds float64) outcome {
	do, isKnown := k.workloads(c)[workload]
	if !isKnown {
		log.Fatalf("there is no workload %q", workload)
	}
	if workload != "optimistic" {
		return measure(do, tasks, seconds)
	}
	before, err := c.number(context.Background(), k.prefix+":counter")
	if err != nil {
		log.Fatal(err)
	}
	found := measure(do, tasks, seconds)
	after, err := c.number(context.Background(), k.prefix+":counter")
	if err != nil || after-before != found.Requests-found.Errors {
		found.Wrong++
	}
	return found
}

func main() {
	if len(os.Args) != 5 {
		log.Fatal("usage: clients CLIENT PORT PREFIX KEYS")
	}
	count, err := strconv.ParseInt(os.Args[4], 10, 64)
	if err != nil {
		log.Fatal(err)
	}
	c, err := connect(os.Args[1], "127.0.0.1:"+os.Args[2])
	if err != nil {
		log.Fatal(err)
	}
	all := &keys{prefix: os.Args[3], count: count}
	lines, replies := bufio.NewScanner(os.Stdin), json.NewEncoder(os.Stdout)
	for lines.Scan() {
		var workload string
		var tasks int
		var seconds float64
		if _, err := fmt.Sscan(lines.Text(), &workload, &tasks, &seconds); err != nil {
			log.Fatal(err)
		}
		if err := replies.Encode(all.run(c, workload, tasks, seconds)); err != nil {
			log.Fatal(err)
		}
	}
}

func connect(name, address string) (client, error) {
	switch name {
	case "go-redis":
		return newGoRedis(address), nil
	case "rueidis", "rueidis-tracking", "rueidis-cache":
		return newRueidis(address, name)
	}
	return nil, fmt.Errorf("there is no client %q", name)
}
