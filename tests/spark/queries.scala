// Two stateful queries of Scala, for spark-shell, statement by statement from its input: a micro-batch of each, then,
// when there is a file `go`, another one.
import java.nio.file.{Files, Paths}
import java.time.Duration
import org.apache.spark.sql.Encoders
import org.apache.spark.sql.streaming._
import spark.implicits._

case class In(k: String, v: Double)
case class Total(n: Long, sum: Double)

class Machine extends StatefulProcessor[String, In, String] {
  @transient private var last: ValueState[Double] = _
  @transient private var total: ValueState[Total] = _
  @transient private var recent: ListState[Double] = _
  @transient private var days: MapState[String, Total] = _
  override def init(outputMode: OutputMode, timeMode: TimeMode): Unit = {
    last = getHandle.getValueState[Double]("last", Encoders.scalaDouble, TTLConfig(Duration.ofHours(1)))
    total = getHandle.getValueState[Total]("total", Encoders.product[Total], TTLConfig.NONE)
    recent = getHandle.getListState[Double]("recent", Encoders.scalaDouble, TTLConfig.NONE)
    days = getHandle.getMapState[String, Total]("days", Encoders.STRING, Encoders.product[Total], TTLConfig.NONE)
  }
  override def handleInputRows(key: String, rows: Iterator[In], timers: TimerValues): Iterator[String] = {
    rows.foreach { row =>
      val before = if (total.exists()) total.get() else Total(0, 0)
      last.update(row.v)
      total.update(Total(before.n + 1, before.sum + row.v))
      recent.appendValue(row.v)
      days.updateValue(s"day${row.v.toInt}", Total(1, row.v))
    }
    Iterator(key)
  }
}

def count(key: String, rows: Iterator[In], state: GroupState[Total]): String = {
  val before = state.getOption.getOrElse(Total(0, 0))
  val values = rows.map(_.v).toSeq
  state.update(Total(before.n + values.size, before.sum + values.sum))
  key
}

def rows = spark.readStream.schema("k string, v double").json("input").as[In].groupByKey(_.k)
def groups = rows.mapGroupsWithState(GroupStateTimeout.NoTimeout)(count _)
def machines = rows.transformWithState(new Machine, TimeMode.ProcessingTime, OutputMode.Update)
def once(made: org.apache.spark.sql.Dataset[String], checkpoint: String): Unit = made.writeStream.outputMode("update").format("noop").option("checkpointLocation", checkpoint).trigger(Trigger.Once).start().awaitTermination()

once(groups, "groups")
spark.conf.set("spark.sql.streaming.stateStore.providerClass", "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider")
spark.conf.set("spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled", "true")
once(machines, "machines")
Files.createFile(Paths.get("ready"))
while (!Files.exists(Paths.get("go"))) Thread.sleep(50)
once(machines, "machines")
spark.conf.unset("spark.sql.streaming.stateStore.providerClass")
once(groups, "groups")
System.exit(0)
