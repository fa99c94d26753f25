// asynq: a job queue over go-redis: tasks with results, retries, delays, unique tasks, the inspector.
package main

import (
	"context"
	"errors"
	"sort"
	"strings"
	"sync"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	. "sparkis/clientprograms/steps"
)

const tasks = 100

type worker struct {
	sync.Mutex
	done  map[string]int
	reads *redis.Client
}

func main() {
	address := asynq.RedisClientOpt{Addr: Address}
	client, inspector := asynq.NewClient(address), asynq.NewInspector(address)
	defer client.Close()
	defer inspector.Close()
	w := &worker{done: map[string]int{}, reads: redis.NewClient(&redis.Options{Addr: Address})}
	server := asynq.NewServer(address, asynq.Config{
		Concurrency: 8, Queues: map[string]int{"default": 1, "low": 1}, LogLevel: asynq.FatalLevel,
		TaskCheckInterval: 20 * time.Millisecond, DelayedTaskCheckInterval: 20 * time.Millisecond,
		RetryDelayFunc: func(int, error, *asynq.Task) time.Duration { return 10 * time.Millisecond },
	})
	Step("tasks before there is a worker", func() (any, error) { return before(client, inspector) })
	if err := server.Start(asynq.HandlerFunc(w.handle)); err != nil {
		panic(err)
	}
	Step("all tasks are done once", func() (any, error) {
		return UntilEqual(func() (int, error) { return w.count("read"), nil }, tasks)
	})
	Step("a failed task is tried again", func() (any, error) {
		client.Enqueue(asynq.NewTask("fails twice", nil), asynq.MaxRetry(5))
		return UntilEqual(func() (int, error) { return w.count("fails twice"), nil }, 3)
	})
	Step("a delayed task is done", func() (any, error) {
		client.Enqueue(asynq.NewTask("delayed", nil), asynq.ProcessIn(200*time.Millisecond))
		return UntilEqual(func() (int, error) { return w.count("delayed"), nil }, 1)
	})
	Step("a task's result is kept", func() (any, error) {
		kept := []asynq.Option{asynq.TaskID("kept"), asynq.Retention(time.Hour), asynq.Queue("low")}
		if _, err := client.Enqueue(asynq.NewTask("with a result", nil), kept...); err != nil {
			return nil, err
		}
		return UntilEqual(func() (string, error) {
			info, err := inspector.GetTaskInfo("low", "kept")
			if err != nil {
				return "", err
			}
			return info.State.String() + " " + string(info.Result), nil
		}, "completed 7")
	})
	server.Shutdown()
	Step("the queues are empty", func() (any, error) {
		queues, err := inspector.Queues()
		sort.Strings(queues)
		found := []any{queues}
		for _, each := range queues {
			info, err := inspector.GetQueueInfo(each)
			if err != nil {
				return nil, err
			}
			found = append(found, info.Pending, info.Active, info.Retry, info.Completed, info.Processed, info.Failed)
		}
		return found, err
	})
}

// before enqueues tasks, and a unique one twice.
func before(client *asynq.Client, inspector *asynq.Inspector) (any, error) {
	for i := 0; i < tasks; i++ {
		if _, err := client.Enqueue(asynq.NewTask("read", []byte(Text(i)))); err != nil {
			return nil, err
		}
	}
	client.Enqueue(asynq.NewTask("unique", nil), asynq.Unique(time.Hour))
	_, again := client.Enqueue(asynq.NewTask("unique", nil), asynq.Unique(time.Hour))
	info, err := inspector.GetQueueInfo("default")
	if err != nil {
		return nil, err
	}
	return []any{info.Pending, again}, nil
}

// handle does a task; those that read have the key of a text, whose number is its value.
func (w *worker) handle(ctx context.Context, task *asynq.Task) error {
	if task.Type() == "read" {
		key := string(task.Payload())
		value, err := w.reads.Get(ctx, key).Result()
		if err != nil || !strings.HasSuffix(key, value) {
			return errors.Join(err, errors.New("a wrong value"))
		}
	}
	w.Lock()
	defer w.Unlock()
	w.done[task.Type()]++
	if task.Type() == "fails twice" && w.done[task.Type()] < 3 {
		return errors.New("not yet")
	}
	if task.Type() == "with a result" {
		value, err := w.reads.Get(ctx, Text(7)).Result()
		task.ResultWriter().Write([]byte(value))
		return err
	}
	return nil
}

func (w *worker) count(kind string) int {
	w.Lock()
	defer w.Unlock()
	return w.done[kind]
}
